"""The web page at ``/``: files of the package, which ask this server alone.

A browser may get them without a key, for they hold nothing; what they ask for then needs one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/script.js": ("script.js", "text/javascript"),
    "/page/markdown.js": ("markdown.js", "text/javascript"),
    "/page/conversations.js": ("conversations.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PATHS = frozenset(_FILES)
"""Everything that makes up the page."""

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
router = APIRouter(include_in_schema=False)


def _answer(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (_FOLDER / name).read_bytes()

    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return answer


for path, (name, media_type) in _FILES.items():
    router.add_api_route(path, _answer(name, media_type), methods=["GET", "HEAD"])
