"""The events of a response that is made in the background, while it is made: streams of it may come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress


class EventLog:
    """Server-sent events in the order of their sequence numbers, which count from 0. Lives in one event loop."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._is_complete = False
        self._grown = asyncio.Event()

    def add(self, written: bytes) -> None:
        """Append events, each of which ends with an empty line."""
        self.events += [f"{event}\n\n" for event in written.decode().split("\n\n") if event]
        self._wake()

    def complete(self) -> None:
        """No more events will come."""
        self._is_complete = True
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()  # each waiter holds the one that it waits for

    async def wait_beyond(self, begin: int, seconds: float | None = None) -> list[str]:
        """The events from number ``begin`` on, as soon as there are some: none once the log is complete, or after
        ``seconds``."""
        if len(self.events) <= begin and not self._is_complete:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._grown.wait(), seconds)
        return self.events[begin:]

    async def follow(self, begin: int) -> AsyncGenerator[bytes, None]:
        """The events from number ``begin`` on, until the log is complete."""
        while events := await self.wait_beyond(begin):
            begin += len(events)
            yield "".join(events).encode()
