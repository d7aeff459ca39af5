"""What passes between a front end and a core that runs elsewhere. Plain, picklable, no torch."""

from __future__ import annotations

import logging
import pickle
import traceback
from dataclasses import dataclass
from typing import Any, Self

from hardpoint.engine.client import CoreFacts, EngineStats
from hardpoint.engine.outputs import FinishReason
from hardpoint.engine.step import TokenLogprobs
from hardpoint_plugin_api import EngineDeadError, EngineError, HardpointError


@dataclass(frozen=True)
class Add:
    """Queue a request. ``request`` is a pickled Request: one that cannot be read fails alone."""

    number: int
    request: bytes


@dataclass(frozen=True)
class Abort:
    """End a request; its end is reported like any other."""

    number: int


@dataclass(frozen=True)
class Call:
    """Call a method of CoreControl, between two steps; its Answer carries the same number."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Stop:
    """Close the core; no report follows."""


@dataclass(frozen=True)
class Wake:
    """Look whether what runs the steps is still there; put by the core's own process."""


Command = Add | Abort | Call | Stop | Wake
"""From the front end to the core."""


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the other side. ``pickled`` is it, where pickle can take it."""

    text: str
    trace: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: Exception) -> Self:
        """``error``, with its traceback where that says more than its message."""
        by_design = isinstance(error, HardpointError) and error.__cause__ is None
        trace = "" if by_design else "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
        except Exception:  # whatever the error holds
            pickled = None
        return cls(f"{type(error).__name__}: {error}", trace, pickled)

    def original(self) -> Exception:
        """The exception itself, or an EngineError with its text where it cannot be rebuilt here."""
        try:
            found = pickle.loads(self.pickled) if self.pickled is not None else None
        except Exception:  # its class is not here, or its constructor takes something else
            found = None
        return self._noted(found if isinstance(found, Exception) else EngineError(self.text))

    def as_engine_error(self, before: str) -> EngineError:
        """An EngineError with the text, behind ``before``."""
        error = EngineError(f"{before}: {self.text}")
        self._noted(error)
        return error

    def _noted(self, error: Exception) -> Exception:
        if self.trace:
            error.add_note(f"In the engine:\n{self.trace}")
        return error


@dataclass(frozen=True)
class Ready:
    """The core is loaded and takes requests."""

    facts: CoreFacts
    stats: EngineStats


@dataclass(frozen=True)
class StartFailed:
    """The core could not be built; nothing follows."""

    failure: Failure


@dataclass(frozen=True)
class Delta:
    """What a request got since the last time. ``prompt_logprobs`` come once, whole, with the first token."""

    number: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int
    num_preemptions: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True)
class Advanced:
    """What came of a step, or of commands."""

    deltas: tuple[Delta, ...]
    stats: EngineStats


@dataclass(frozen=True)
class Failed:
    """These requests were ended by a failure, which the core survived."""

    numbers: tuple[int, ...]
    failure: Failure
    stats: EngineStats


@dataclass(frozen=True)
class Answer:
    """What came of a Call: its result, or its failure. Goes to the caller, not among the reports."""

    number: int
    result: object = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Ended:
    """The core is gone: closed, or lost as ``error`` says. Comes last, from the link itself."""

    error: EngineDeadError


@dataclass(frozen=True)
class Logged:
    """A log record of the core's process, for the front end's own handlers."""

    record: logging.LogRecord


Report = Ready | StartFailed | Advanced | Failed | Ended
"""From the core to the front end."""
