"""Reading requests: JSON as strict as its standard, and what several endpoints check alike."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from hardpoint.server.errors import ApiError
from hardpoint.server.fields import StreamOptions


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
    """A route whose handler reads a JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given another kind of request."""
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive, request._send))

        return read_strictly


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


_OWN_KWARGS = {"messages", "tools", "template", "add_generation_prompt", "continue_final_message"}


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
