"""Calls between processes: what passes, and who waits for an answer. Plain, picklable, no torch."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from hardpoint.engine.control import Verb
from hardpoint_plugin_api import EngineDeadError, EngineError, HardpointError


@dataclass(frozen=True)
class Call:
    """Do a control verb between two steps; its Answer carries the same number."""

    number: int
    verb: Verb[Any]


@dataclass(frozen=True)
class Stop:
    """Close the core; no report follows."""


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
class Answer:
    """The answer to a Call: its result, or its failure. Goes to the caller, not among the reports."""

    number: int
    result: object = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Logged:
    """A log record of the core's process, for the front end's own handlers."""

    record: logging.LogRecord


class Answers:
    """Calls under way. A link's reader takes what comes back."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Future[object], Callable[[object], None]]] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._lost: EngineDeadError | None = None
        self.num_taken = 0
        """How many answers have come."""

    def expect(self, note: Callable[[object], None] = lambda result: None) -> tuple[int, Future[object]]:
        """A number for a call, and what will become of it. Raises EngineDeadError once the core is gone.

        ``note`` is given the result in the reader's thread, before anything that the core sends later is read, and
        before the caller has it.
        """
        with self._lock:
            if self._lost is not None:
                raise EngineDeadError(str(self._lost))
            number = next(self._numbers)
            future: Future[object] = Future()
            self._waiting[number] = future, note
        return number, future

    @property
    def are_due(self) -> bool:
        """True while anybody waits."""
        return bool(self._waiting)

    def take(self, answer: Answer) -> None:
        """Hand ``answer`` to its caller; one that comes after ``lose`` is dropped."""
        with self._lock:
            waiting = self._waiting.pop(answer.number, None)
            self.num_taken += 1
        if waiting is None:
            return
        future, note = waiting
        if answer.failure is None:
            note(answer.result)
            future.set_result(answer.result)
        else:
            future.set_exception(answer.failure.original())

    def lose(self, error: EngineDeadError) -> None:
        """The core is gone: nobody waits any longer."""
        with self._lock:
            self._lost = error
            waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            future.set_exception(EngineDeadError(str(error)))
