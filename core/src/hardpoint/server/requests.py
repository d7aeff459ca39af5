"""Reading requests: JSON as strict as its standard, unknown fields, and what several endpoints check alike."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from hardpoint.server.errors import ApiError
from hardpoint.server.fields import StreamOptions, take_unknown
from hardpoint.server.gate import ADDED_HEADERS, REQUEST_ID
from hardpoint.server.service import Service

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-hardpoint-ignored-fields"
_MAX_LISTED = 32
"""Ignored fields that a response lists."""
_current: ContextVar[Request] = ContextVar("current request")


class JsonRequest(Request):
    """A request whose body is JSON that can be written again: no NaN, no half of a surrogate pair, no deep nesting."""

    async def json(self) -> Any:
        """The parsed body. Raises ApiError 400."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise InvalidJsonError(str(error)) from None


class InvalidJsonError(ApiError):
    """A body that is no JSON."""

    def __init__(self, why: str) -> None:
        super().__init__(400, f"the body is not valid JSON: {why}", code="invalid_json")


class JsonRoute(APIRoute):
    """A route whose handler has the parameters ``body``, made of a JsonRequest, and ``service``.

    Fields that the body's models do not name are ignored, listed in a header of the response and logged once, or with
    ``--strict-fields`` refused.
    """

    def __init__(self, path: str, endpoint: Callable[..., Coroutine[Any, Any, Any]], **options: Any) -> None:
        @functools.wraps(endpoint)
        async def with_known_fields(*, body: Any, service: Service, **others: Any) -> Any:
            if unknown := take_unknown(body):
                _ignore(unknown, service, _current.get())
            return await endpoint(body=body, service=service, **others)

        super().__init__(path, with_known_fields, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given another kind of request."""
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            own = JsonRequest(request.scope, request.receive, request._send)
            _current.set(own)
            return await handle(own)

        return read_strictly


def _ignore(names: Sequence[str], service: Service, request: Request) -> None:
    """Say that the fields ``names`` are ignored. Raises ApiError where the server refuses them."""
    if service.settings.strict_fields:
        raise ApiError(
            400,
            f"{names[0]:.200} is not a field that this endpoint knows; leave it out (docs/serving.md lists the fields)",
            param=names[0],
        )
    listed = ", ".join(quote(name[:80], safe="[]") for name in names[:_MAX_LISTED])
    request.scope[ADDED_HEADERS].append((IGNORED_HEADER.encode(), listed.encode()))
    for name in names[:_MAX_LISTED]:
        service.log_ignored(request.url.path, name)


def request_id(request: Request) -> str:
    """The request's id: its header ``x-request-id``, or a new one."""
    return str(request.scope[REQUEST_ID])


def data_parallel_rank(request: Request) -> int | None:
    """The replica that the request asks for by its header ``x-data-parallel-rank``; None: any. Raises ApiError."""
    given = request.headers.get("x-data-parallel-rank")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal()) or len(given) > 9:
        raise ApiError(400, f"the header x-data-parallel-rank must be a replica's number, got {given[:80]!r}")
    return int(given)


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """Raise ApiError where there are options and no stream."""
    if options is not None and not stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def check_best_of(best_of: int | None, n: int | None) -> None:
    """Raise ApiError for more completions than are returned."""
    if best_of is not None and best_of != (n or 1):
        raise ApiError(
            400,
            f"best_of {best_of} is not supported: ask for that many completions with n, and choose by their logprobs",
            param="best_of",
        )


_OWN_KWARGS = {"messages", "tools", "template", "add_generation_prompt", "continue_final_message"} | {
    "add_special_tokens",
    "is_limited",
}


def checked_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template. Raises ApiError for those that have a field of their own, or cannot be any."""
    for name in kwargs or ():
        if name in _OWN_KWARGS:
            raise ApiError(
                400,
                f"chat_template_kwargs holds {name!r}, which is a field of the request itself; set it there",
                param="chat_template_kwargs",
            )
    if "self" in (kwargs or ()):
        problem = "chat_template_kwargs holds 'self', which templates have themselves"
        raise ApiError(400, problem, param="chat_template_kwargs")
    return dict(kwargs or {})
