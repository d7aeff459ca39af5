"""The queue of requests without a slot."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator

from hardpoint.engine.scheduling.request import Request


class WaitingQueue:
    """Unfinished requests without a slot, by precedence. Long prompts are kept apart, so that others can pass them.

    A request that ends while it waits stays in its list until it comes up; ``drop`` counts it out.
    """

    def __init__(self) -> None:
        self._short: list[Request] = []  # each list in falling order: its last request starts first
        self._long: list[Request] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return self.ordered(len(self._long))

    def ordered(self, num_long: int) -> Iterator[Request]:
        """The requests by precedence, with up to ``num_long`` of those whose prompts are long."""
        short, long = _unfinished(self._short), itertools.islice(_unfinished(self._long), num_long)
        return heapq.merge(short, long, key=lambda request: request.precedence)

    def add(self, request: Request, is_long: bool) -> None:
        """Queue ``request``."""
        bisect.insort(self._long if is_long else self._short, request, key=_from_last)
        self._size += 1

    def drop(self) -> None:
        """Count out a request that has ended."""
        self._size -= 1

    def take(self, request: Request) -> None:
        """Take out ``request``, which is ``first_short`` or ``first_long``."""
        queue = self._short if self._short and self._short[-1] is request else self._long
        assert queue[-1] is request, "only a first request starts"
        queue.pop()
        self._size -= 1

    @property
    def first_short(self) -> Request | None:
        """The first request whose prompt is not long."""
        return _last_unfinished(self._short)

    @property
    def first_long(self) -> Request | None:
        """The first request whose prompt is long."""
        return _last_unfinished(self._long)


def _from_last(request: Request) -> tuple[int, int]:
    priority, number = request.precedence
    return -priority, -number


def _unfinished(queue: list[Request]) -> Iterator[Request]:
    return (request for request in reversed(queue) if request.finish_reason is None)


def _last_unfinished(queue: list[Request]) -> Request | None:
    while queue and queue[-1].finish_reason is not None:
        queue.pop()
    return queue[-1] if queue else None
