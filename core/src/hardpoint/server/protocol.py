"""HTTP on one connection: uvicorn's protocol, with limits on how long a request's head may take and how large it is."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 2**16


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection that brings no whole head within ``head_timeout`` seconds of its beginning.

    On a connection that is kept, the time begins with the end of the last answer; uvicorn closes it earlier where
    nothing comes at all.
    """

    head_timeout: ClassVar[float]

    @classmethod
    def within(cls, head_timeout: float) -> type[TimedProtocol]:
        """The protocol with that time limit."""
        return type("TimedProtocol", (cls,), {"head_timeout": head_timeout})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None  # while a head is waited for, or the rest of a body
        self._head_bytes = 0
        self._reads_body = False
        self._open: list[RequestResponseCycle] = []  # requests without their answer, the one that runs first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.pipeline.clear()
        for cycle in self._open:  # uvicorn tells the newest alone
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._reads_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._timer is not None and not self._reads_body and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > MAX_HEAD_BYTES:  # it came in one piece
            self._refuse(b"431 Request Header Fields Too Large")
            raise ValueError("the head of a request is too large")
        self._reads_body = True
        super().on_headers_complete()
        self._open.append(self.cycle)

    def on_message_complete(self) -> None:
        self._reads_body = False
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # answered before its body had come
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # else the request was refused already
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        if self.cycle.response_complete and not self.transport.is_closing():  # else the next one is under way
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer, self._head_bytes = self.loop.call_later(self.head_timeout, self._give_up), 0

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._head_bytes and not self._reads_body:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
