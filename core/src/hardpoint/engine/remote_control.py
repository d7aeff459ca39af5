"""Calls to a core that runs elsewhere: each waits for its answer, whoever steps the core meanwhile."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, cast

from hardpoint.engine.admission import Admission
from hardpoint.engine.control import MemoryReport
from hardpoint.engine.messages import Answer, Call, Command
from hardpoint_plugin_api import ConfigError, EngineDeadError, MemoryTag

if TYPE_CHECKING:
    import torch

    from hardpoint.metrics import MetricsSnapshot


class Answers:
    """Calls under way. A link's reader takes what comes back."""

    def __init__(self) -> None:
        self._waiting: dict[int, Future[object]] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._lost: EngineDeadError | None = None

    def expect(self) -> tuple[int, Future[object]]:
        """A number for a call, and what will become of it. Raises EngineDeadError once the core is gone."""
        with self._lock:
            if self._lost is not None:
                raise EngineDeadError(str(self._lost))
            number = next(self._numbers)
            future: Future[object] = Future()
            self._waiting[number] = future
        return number, future

    def take(self, answer: Answer) -> None:
        """Hand ``answer`` to whoever waits for it."""
        with self._lock:
            future = self._waiting.pop(answer.number)
        if answer.failure is None:
            future.set_result(answer.result)
        else:
            future.set_exception(answer.failure.original())

    def lose(self, error: EngineDeadError) -> None:
        """The core is gone: nobody waits any longer."""
        with self._lock:
            self._lost = error
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(EngineDeadError(str(error)))


class CallLink(Protocol):
    """As much of a link as calls need."""

    answers: Answers

    def send(self, command: Command) -> None:
        """Pass ``command`` on, in order; never waits."""
        ...


class RemoteControl:
    """The CoreControl of a core behind a link. May be called from any thread; what the core raises is raised here."""

    _link: CallLink
    _admission: Admission

    def sleep(self, tags: Collection[MemoryTag]) -> frozenset[MemoryTag]:
        """Give back the memory of ``tags``; see CoreControl."""
        return self._note(self._call("sleep", tuple(tags)))

    def wake_up(self, tags: Collection[MemoryTag]) -> frozenset[MemoryTag]:
        """Take the memory of ``tags`` again; see CoreControl."""
        return self._note(self._call("wake_up", tuple(tags)))

    def update_weights(self, source: str | Iterable[tuple[str, torch.Tensor]]) -> frozenset[MemoryTag]:
        """Replace the weights; see CoreControl. Raises ConfigError for tensors, which do not travel."""
        if not isinstance(source, str):
            raise ConfigError(
                "tensors can be given to an engine whose core runs in the caller's thread alone (LLM without "
                "core_process); save them to a folder and give that"
            )
        return self._note(self._call("update_weights", source))

    def memory_report(self) -> MemoryReport:
        """Who holds how much; see CoreControl."""
        return cast(MemoryReport, self._call("memory_report"))

    def metrics(self) -> MetricsSnapshot:
        """What was counted; see CoreControl."""
        return cast("MetricsSnapshot", self._call("metrics"))

    def start_profile(self, folder: str, layers: bool = False) -> None:
        """Start a profile; see CoreControl."""
        self._call("start_profile", folder, layers)

    def stop_profile(self) -> None:
        """End the profile and write it; see CoreControl."""
        self._call("stop_profile")

    def _call(self, method: str, *args: Any) -> object:
        number, future = self._link.answers.expect()
        self._link.send(Call(number, method, args))
        return future.result()

    def _note(self, asleep: object) -> frozenset[MemoryTag]:
        """Remember what sleeps, so that requests are refused where they are made."""
        tags = cast("frozenset[MemoryTag]", asleep)
        self._admission.asleep = tags
        return tags
