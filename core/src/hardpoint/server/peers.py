"""Questions of a server's processes to each other. A process that is alone answers itself."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hardpoint.metrics import MetricsSnapshot

if TYPE_CHECKING:
    from hardpoint.server.service import Service

_NEWS_SECONDS = 1.0
"""How long a process waits for an event before it answers another that there is none."""

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Question(ABC, Generic[T_co]):
    """A frozen dataclass that pickle takes. Each process answers it in its event loop."""

    @abstractmethod
    async def answer(self, service: Service) -> T_co:
        """The answer of one process."""


@dataclass(frozen=True)
class ReadCounts(Question[MetricsSnapshot]):
    """The metrics of a process."""

    async def answer(self, service: Service) -> MetricsSnapshot:
        return service.metrics.counted()


@dataclass(frozen=True)
class EndResponse(Question[None]):
    """End a response that is made in the background, wherever that is, and wait for its end."""

    owner: str
    response_id: str

    async def answer(self, service: Service) -> None:
        task = service.background.get((self.owner, self.response_id))
        if task is not None:
            task.cancel()
            await asyncio.wait({task})


@dataclass(frozen=True)
class ReadEvents(Question[list[str] | None]):
    """Events of a response that is made in the background, from number ``begin`` on; None: it is not made here.

    The answer waits ``_NEWS_SECONDS`` for the first of them.
    """

    owner: str
    response_id: str
    begin: int

    async def answer(self, service: Service) -> list[str] | None:
        log = service.event_logs.get((self.owner, self.response_id))
        return None if log is None else await log.wait_beyond(self.begin, _NEWS_SECONDS)


class Peers(Protocol):
    """The processes of a server, as one of them sees them."""

    async def ask(self, question: Question[T], service: Service) -> list[T]:
        """The answers of all processes that answer in time, this one's first."""
        ...

    async def all_loaded(self) -> None:
        """Return once every process of the server can serve, this one included."""
        ...


class Alone:
    """The Peers of a server with one process."""

    async def ask(self, question: Question[T], service: Service) -> list[T]:
        """Answer the question in this process, the only one."""
        return [await question.answer(service)]

    async def all_loaded(self) -> None:
        """Return at once."""


class OpenRequests:
    """How many POST requests are being answered, and responses made in the background, by all processes of a server.

    ``counts`` is shared memory with a number for each process, which writes its ``own`` alone.
    """

    def __init__(self, counts: MutableSequence[int] | None = None, own: int = 0) -> None:
        self._counts = [0] if counts is None else counts
        self._own = own

    @property
    def total(self) -> int:
        """The number of all processes together."""
        return sum(self._counts)

    def enter(self, most: int) -> bool:
        """Count one more, unless there are ``most``. Counting comes first: of several processes that do this at once
        at the limit all may be refused, and none is let in beyond it."""
        self.begin()
        if self.total > most:
            self.end()
            return False
        return True

    def begin(self) -> None:
        """Count one more, whatever the number."""
        self._counts[self._own] += 1

    def end(self) -> None:
        """Count one less."""
        self._counts[self._own] -= 1
