"""Outputs on their way from the thread that makes them to the tasks that wait for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from hardpoint.engine.frontend.conversation import Conversation
from hardpoint.engine.outputs import RequestOutput, RequestOutputKind
from hardpoint.engine.requests import RequestProgress
from hardpoint_plugin_api import EngineError, HardpointError

logger = logging.getLogger(__name__)

News = RequestOutput | HardpointError


class RequestStream:
    """The growing output of one prompt, as an async iterator; one task at a time reads it.

    It keeps one output: the newest, or with RequestOutputKind.DELTA all parts that were not read, joined. So a slow
    reader costs no memory and gets longer steps. ``close`` ends the request if it has not ended; leaving the stream as
    an async context manager does so too.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, forget: Callable[[RequestStream], None]) -> None:
        """``forget`` is called, from any thread, once nothing more will come of the request."""
        self.request_id, self.mailbox = request_id, mailbox
        self._forget = forget
        self._conversation: Conversation | None = None
        self._closed = self._aborted = self._complete = False
        self._error: HardpointError | None = None
        self._news: News | None = None
        self._waiter: asyncio.Future[None] | None = None  # an Event would cost every token twice as much

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, once there is news. Raises what ended it: EngineError, or RequestError."""
        while self._news is None and not (self._closed or self._complete):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, None
        if news is None:
            raise StopAsyncIteration
        self._complete = isinstance(news, HardpointError) or news.finished
        if isinstance(news, HardpointError):
            raise news
        return news

    def abort(self) -> None:
        """End the request as it is; its last output still comes. May be called in any thread."""
        self._aborted = True
        if self._conversation is not None:
            self._conversation.abort()

    def stop(self, index: int) -> None:
        """End one completion, of which there is some output already, as one that has come to its own end."""
        if self._conversation is not None:
            self._conversation.stop(index)

    def close(self) -> None:
        """End the request, whose output nobody wants any more. To be called in the stream's event loop."""
        self.abandon()
        self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The rest is for the engine and its threads.

    @property
    def is_closed(self) -> bool:
        """True where nobody wants its output any more."""
        return self._closed

    def begin(self, conversation: Conversation) -> None:
        """Take the conversation whose output this is; it may have been aborted before it began."""
        self._conversation = conversation
        if self._aborted:
            conversation.abort()

    def advance(self, request: RequestProgress) -> bool:
        """Take what ``request`` has got; True where that is news for the reader."""
        assert self._conversation is not None
        if self._closed or self._error is not None:
            return False
        try:
            if request.error is None:
                return self._conversation.advance(request)
            self._error = request.error
        except Exception as error:  # a tokenizer can raise anything
            logger.exception("request %s: its output cannot be turned into text", self.request_id)
            self._error = EngineError(f"the output cannot be turned into text: {type(error).__name__}: {error}")
        self._conversation.abort()
        return True

    def newest(self) -> News:
        """The output that the reader gets next. Forgets the request where nothing follows."""
        assert self._conversation is not None
        if self._error is not None or self._conversation.output.finished:
            self._forget(self)
        return self._conversation.take() if self._error is None else self._error

    def joined(self, held: News | None, news: News) -> News:
        """Return the reader's next output: ``held``, which it has not seen, with the newer ``news``."""
        kind = None if self._conversation is None else self._conversation.kind
        if kind is RequestOutputKind.DELTA and isinstance(held, RequestOutput) and isinstance(news, RequestOutput):
            held.extend(news)
            return held
        return news

    def receive(self, news: News) -> None:
        """Wake the reader. For its event loop alone."""
        self._news = self.joined(self._news, news)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abandon(self) -> None:
        """End the request where nobody can be waiting."""
        self._closed = True
        self.abort()
        self._forget(self)


class Mailbox:
    """News for the streams of one event loop, joined for each stream, all delivered at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: dict[RequestStream, News] = {}

    def put(self, news: Mapping[RequestStream, News]) -> None:
        """Have ``news`` delivered by the event loop; where that is closed, the requests end. For any thread."""
        with self._lock:
            is_called = bool(self._waiting)
            self._waiting |= {stream: stream.joined(self._waiting.get(stream), each) for stream, each in news.items()}
        if not is_called:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed
                for stream in news:
                    stream.abandon()

    def _deliver(self) -> None:
        with self._lock:
            news, self._waiting = self._waiting, {}
        for stream, each in news.items():
            stream.receive(each)
