"""Requests that are prepared beside the steps of others, before a core queues them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from hardpoint.engine.remote.messages import Prepared
from hardpoint.engine.scheduling.request import Request
from hardpoint.structured import NICE

_STACK_BYTES = 2**24


class Preparations:
    """Calls ``prepare`` for one request after the other, in a thread of low priority, and ``done`` with the outcome.

    The thread starts with the first request.
    """

    def __init__(self, prepare: Callable[[Request], None], done: Callable[[Prepared], None]) -> None:
        self._prepare, self._done = prepare, done
        self._queue: SimpleQueue[Request | None] = SimpleQueue()
        self._requests: dict[int, Request] = {}
        self._thread: threading.Thread | None = None

    def start(self, request: Request) -> None:
        """Prepare ``request`` as soon as those before it are done."""
        self._requests[request.number] = request
        self._queue.put(request)
        if self._thread is None:
            self._thread = _started(self._run)

    def take(self, number: int) -> Request | None:
        """Give up a request, done or not; None for one that is not held here."""
        return self._requests.pop(number, None)

    def close(self) -> None:
        """Let the thread end behind the request that it prepares now, which is not waited for."""
        self._requests.clear()
        self._queue.put(None)

    def _run(self) -> None:
        _lower_priority()
        for request in self._taken():
            if request.number not in self._requests:  # aborted meanwhile
                continue
            error: Exception | None = None
            try:
                self._prepare(request)
            except Exception as raised:
                error = raised
            self._done(Prepared(request.number, error))

    def _taken(self) -> Iterator[Request]:
        while (request := self._queue.get()) is not None:
            yield request


def _started(run: Callable[[], None]) -> threading.Thread:
    """A thread with as much stack as the deepest grammar takes that was let in."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="hardpoint-preparations", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
