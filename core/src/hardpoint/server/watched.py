"""Answers whose work ends when their client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hardpoint.server.errors import JsonResponse, as_api_error, error_body, error_response
from hardpoint.server.gate import SEND

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on one by one
]


class Watched(Response):
    """An ASGI answer in two tasks: one makes it, the other notices that the client has gone and cancels the first."""

    async def answer(self, scope: Scope, send: Send) -> None:
        """Make and send the answer."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self.answer(scope, send))
        watching = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.wait({answering, watching})
        if not answering.cancelled():
            answering.result()


async def _left(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class JsonAnswer(Watched):
    """A JSON response whose body ``make`` computes in a thread."""

    def __init__(self, make: Callable[[], Awaitable[Any]]) -> None:
        super().__init__()
        self._make = make

    async def answer(self, scope: Scope, send: Send) -> None:
        await JsonResponse(await self._make())(scope, _no_receive, send)


class EventStream(Watched):
    """Server-sent events, as ``events`` makes their bytes; what it yields is sent in one piece.

    The status is sent with the first event: a failure before that is an ordinary error answer. One after it becomes a
    last event, made of the error's JSON by ``failed``.
    """

    def __init__(
        self, request: Request, events: AsyncGenerator[bytes, None], failed: Callable[[dict[str, Any]], bytes]
    ) -> None:
        super().__init__()
        self._path, self._events, self._failed = request.url.path, events, failed

    async def answer(self, scope: Scope, send: Send) -> None:
        started = False
        start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
        send_event: Send = scope.get(SEND, send)  # what stands between looks at beginnings alone, and costs per token
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not started:
                        started = True
                        await send(start)
                    await send_event({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not started:
                await error_response(self._path, error)(scope, _no_receive, send)
                return
            body = error_body(self._path, as_api_error(error))
            await send({"type": "http.response.body", "body": self._failed(body), "more_body": True})
        if not started:  # there are no events
            await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def data_event(data: Any) -> bytes:
    """One event in OpenAI's form: data alone."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """One event that carries its type as a name too."""
    return b"event: " + str(data["type"]).encode("ascii") + b"\n" + data_event(data)


async def _no_receive() -> Message:
    raise AssertionError("an answer that is complete reads nothing")
