"""Control verbs for a core that runs elsewhere: each waits for its answer, whoever steps the core meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

from hardpoint.engine.control import LoadAdapter, R, Sleep, UnloadAdapter, UpdateWeights, Verb, WakeUp
from hardpoint.engine.lora import Adapter
from hardpoint.engine.processes.calls import Answers, Call
from hardpoint.engine.remote.messages import Command
from hardpoint.engine.scheduling.admission import Admission
from hardpoint_plugin_api import ConfigError, EngineDeadError, MemoryTag

if TYPE_CHECKING:
    pass


class CallLink(Protocol):
    """As much of a link as calls need."""

    answers: Answers

    def send(self, command: Command) -> None:
        """Pass ``command`` on, in order; never waits."""
        ...

    def give_up(self, reason: str) -> None:
        """End a core that is of no use."""
        ...


class RemoteControl:
    """The CoreControl of a core behind a link. May be called from any thread; what the core raises is raised here."""

    _link: CallLink
    _admission: Admission
    _adapting: threading.Lock
    """Held from a call that loads or unloads an adapter to its answer: answers are taken in the core's order."""
    _weights: UpdateWeights | None = None
    """How the checkpoint's own weights were replaced."""

    def control(self, verb: Verb[R]) -> R:
        """Have the core do it; see CoreControl."""
        if isinstance(verb, UpdateWeights) and not isinstance(verb.source, str):
            raise ConfigError(
                "tensors can be given to an engine whose core runs in the caller's thread alone (LLM without "
                "core_process); save them to a folder and give that"
            )
        if isinstance(verb, LoadAdapter | UnloadAdapter):
            with self._adapting:
                answer = self._call(verb)
                self._admission.adapters = cast("tuple[Adapter, ...]", answer)
            return cast(R, answer)
        answer = self._call(verb)
        if isinstance(verb, Sleep | WakeUp | UpdateWeights):  # requests are refused where they are made
            self._admission.asleep = cast("frozenset[MemoryTag]", answer)
        if isinstance(verb, UpdateWeights):
            self._weights = verb
        return cast(R, answer)

    def _call(self, verb: Verb[object]) -> object:
        """The core's answer."""
        number, future = self._link.answers.expect()
        self._link.send(Call(number, verb))
        return future.result()

    def _repeat_calls(self, at_start: tuple[Adapter, ...]) -> None:
        """Bring a core that was built again to where the last one was: its adapters, of which its start has loaded
        some, its weights, and what of it sleeps."""
        with suppress(EngineDeadError):  # gone again already: another will be built
            places = {(adapter.name, adapter.path) for adapter in self._admission.adapters}
            for adapter in at_start:
                if (adapter.name, adapter.path) not in places:
                    self._repeat(UnloadAdapter(adapter.name))
            for name, path in sorted(places):
                self._repeat(LoadAdapter(name, path))
            if self._weights is not None:
                self._repeat(self._weights)
            if self._admission.asleep:
                self._repeat(Sleep(tuple(self._admission.asleep)))

    def _repeat(self, verb: Verb[object]) -> None:
        number, future = self._link.answers.expect()
        link = self._link

        def check(answered: Future[object]) -> None:
            if (error := answered.exception()) is not None:  # what it would serve is not what was asked for
                link.give_up(f"{type(verb).__name__} failed on the engine that was built again: {error}")

        future.add_done_callback(check)
        link.send(Call(number, verb))
