"""Messages between a front end and a core that runs elsewhere. Plain, picklable, no torch."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Self

from hardpoint.engine.client import CoreFacts, EngineStats
from hardpoint.engine.lora import Adapter
from hardpoint.engine.processes.calls import Answer, Call, Failure, Stop
from hardpoint.engine.remote.news import News
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.engine.requests import AdmittedRequest, Delta
from hardpoint.plugin_host.culprits import Suspect
from hardpoint_plugin_api import EngineDeadError, MemoryTag, RequestError


@dataclass(frozen=True)
class Add:
    """Queue a request. ``asked`` is a pickled AdmittedRequest: one that cannot be read fails alone.

    ``so_far`` is what another core made of it, from where it goes on.
    """

    number: int
    asked: bytes
    so_far: Delta | None = None

    @classmethod
    def of(cls, asked: AdmittedRequest, so_far: Delta | None = None) -> Self:
        """The message for ``asked``. Raises RequestError for parameters that cannot be sent."""
        try:
            return cls(asked.number, pickle.dumps(asked), so_far)
        except Exception as error:  # parameters may hold any mapping and any number
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error


@dataclass(frozen=True)
class Abort:
    """End a request; its end is reported like any other."""

    number: int


@dataclass(frozen=True)
class Wake:
    """Look whether what runs the steps is still there; put by the core's own process."""


@dataclass(frozen=True)
class Prepared:
    """A request can be queued, or not, as ``error`` says; put by the core's own process."""

    number: int
    error: Exception | None = None


Command = Add | Abort | Call | Stop | Wake | Prepared
"""From the front end to the core, and from threads of the core to itself."""


@dataclass(frozen=True)
class Ready:
    """The core is loaded and takes requests. ``suspects`` are asked for where it is built again after a failure."""

    facts: CoreFacts
    stats: EngineStats
    suspects: tuple[Suspect, ...] = ()


@dataclass(frozen=True)
class StartFailed:
    """The core could not be built; nothing follows."""

    failure: Failure


@dataclass(frozen=True)
class Advanced:
    """Results of a step, or of commands."""

    news: News
    stats: EngineStats


@dataclass(frozen=True)
class Failed:
    """These requests were ended by a failure, which the core survived; all that were open where a step failed."""

    numbers: tuple[int, ...]
    failure: Failure
    stats: EngineStats
    in_step: bool = False


@dataclass(frozen=True)
class Ended:
    """The engine's core ended: closed, or lost as ``error`` says. The last message, made by the link itself.

    ``stack``: the core's stack trace, where it crashed, hung or raised.
    """

    error: EngineDeadError
    stack: str = ""


Report = Ready | StartFailed | Advanced | Failed | Ended
"""From the core to the front end."""


@dataclass(frozen=True)
class Standing:
    """The state of a core that changes beside its requests. A hub tells its front ends, which answer with Noted.

    ``number`` counts the changes.
    """

    number: int
    facts: CoreFacts
    adapters: tuple[Adapter, ...]
    asleep: frozenset[MemoryTag]
    recovery: RecoveryState


@dataclass(frozen=True)
class Noted:
    """A front end has taken the Standing of this number."""

    number: int


@dataclass(frozen=True)
class Joined:
    """A front end's first message from a hub. ``seed``: where its own sequence of seeds begins."""

    standing: Standing
    stats: EngineStats
    seed: int


FrontEndCommand = Add | Abort | Call | Noted
"""From one of several front ends to the hub."""
HubReport = Joined | Standing | Advanced | Failed | Ended | Answer
"""From the hub to one of its front ends."""
