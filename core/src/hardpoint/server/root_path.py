"""A server that a proxy shows below a path of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware: takes the proxy's path off that of a request, where the proxy has left it there."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :], "raw_path": scope["raw_path"][len(self._prefix) :]}
        await self._app(scope, receive, send)
