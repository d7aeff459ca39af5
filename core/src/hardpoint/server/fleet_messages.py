"""Messages between a server's processes and the one that started them. Plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardpoint.engine.processes.calls import Failure
from hardpoint.server.peers import Question


@dataclass(frozen=True)
class Loaded:
    """The process can serve."""


@dataclass(frozen=True)
class Failed:
    """The process ends, and so would another in its place."""

    failure: Failure


@dataclass(frozen=True)
class Ask:
    """Put ``question`` to all other processes; ``own``: the answer of this one."""

    number: int
    question: Question[Any]
    own: object


@dataclass(frozen=True)
class Told:
    """The answer to an Asked."""

    number: int
    answer: object


@dataclass(frozen=True)
class Pong:
    """The answer to a Ping, from the process's event loop."""


FromApi = Loaded | Failed | Ask | Told | Pong


@dataclass(frozen=True)
class AllLoaded:
    """Every process can serve."""


@dataclass(frozen=True)
class Asked:
    """A question of another process."""

    number: int
    question: Question[Any]


@dataclass(frozen=True)
class Answered:
    """The answers to an Ask."""

    number: int
    answers: list[Any]


@dataclass(frozen=True)
class Ping:
    """Say that you still run."""


@dataclass(frozen=True)
class Stop:
    """End within ``deadline`` seconds; 0: at once."""

    deadline: float


ToApi = AllLoaded | Asked | Answered | Ping | Stop
