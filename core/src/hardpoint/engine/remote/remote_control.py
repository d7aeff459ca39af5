"""Control verbs for a core that runs elsewhere: each waits for its answer, whoever steps the core meanwhile."""

from __future__ import annotations

import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, cast

from hardpoint.engine.control import LoadAdapter, R, Sleep, UnloadAdapter, UpdateWeights, Verb, WakeUp
from hardpoint.engine.lora import Adapter
from hardpoint.engine.processes.calls import Answers, Call
from hardpoint.engine.remote.messages import Command
from hardpoint.engine.scheduling.admission import Admission
from hardpoint_plugin_api import CapacityError, CheckpointError, ConfigError, EngineDeadError, MemoryTag

logger = logging.getLogger(__name__)


class CallLink(Protocol):
    """As much of a link as calls need."""

    answers: Answers

    def send(self, command: Command) -> None:
        """Pass ``command`` on, in order; never waits."""
        ...

    def give_up(self, reason: str) -> None:
        """End a core that is of no use."""
        ...


def check_travels(verb: Verb[object]) -> None:
    """Raise ConfigError for a verb that cannot be sent to a core elsewhere."""
    if isinstance(verb, UpdateWeights) and not isinstance(verb.source, str):
        raise ConfigError(
            "tensors can be given to an engine whose core runs in the caller's thread alone (LLM without "
            "core_process); save them to a folder and give that"
        )


class RemoteControl(ABC):
    """The CoreControl of a core behind a link. May be called from any thread; what the core raises is raised here."""

    _link: CallLink
    _admission: Admission
    _opening: threading.Lock
    """Of all that a restart changes; held for moments."""
    _lost_adapters: dict[str, str]
    """Why adapters that were loaded are not any more, by name: a core that was built again could not load them."""
    _weights: UpdateWeights | None = None
    """How the checkpoint's own weights were replaced."""

    @property
    @abstractmethod
    def _answer_seconds(self) -> float:
        """How long a core may answer nobody while a call is under way; then it hangs, and is given up."""

    def control(self, verb: Verb[R]) -> R:
        """Run a verb in the core; see CoreControl."""
        check_travels(verb)
        link = self._link  # the same for both, whatever a restart does meanwhile
        number, future = link.answers.expect(functools.partial(self._note, verb))
        link.send(Call(number, verb))
        while True:
            num_taken, seconds = link.answers.num_taken, self._answer_seconds
            try:
                return cast(R, future.result(seconds))
            except TimeoutError:
                if future.done():
                    return cast(R, future.result())
                if link.answers.num_taken == num_taken:
                    name = type(verb).__name__
                    link.give_up(f"{name} was not answered within {seconds:g} seconds (--core-start-timeout)")

    def _note(self, verb: Verb[object], answer: object) -> None:
        """Note what ``verb`` has changed: requests are refused where they are made, and a core that is built again is
        brought there. Called in the link's reader, in the core's order, so before it is known that the core is gone.
        """
        if isinstance(verb, LoadAdapter | UnloadAdapter):
            self._note_adapter(verb.name, cast("tuple[Adapter, ...]", answer))
        if isinstance(verb, Sleep | WakeUp | UpdateWeights):
            self._admission.asleep = cast("frozenset[MemoryTag]", answer)
        if isinstance(verb, UpdateWeights):
            self._weights = verb

    def _note_adapter(self, name: str, loaded: Iterable[Adapter], lost: str | None = None) -> None:
        """Note whether ``name`` is among those ``loaded``, and why it was ``lost``. The others stay as they are."""
        with self._opening:
            others = tuple(adapter for adapter in self._admission.adapters if adapter.name != name)
            self._admission.adapters = others + tuple(adapter for adapter in loaded if adapter.name == name)
            self._lost_adapters.pop(name, None)
            if lost is not None:
                self._lost_adapters[name] = lost

    def _repeat_calls(self, link: CallLink) -> None:
        """Bring a core that is built again, behind ``link``, to where the last one was: its adapters, its weights, and
        what of it sleeps. It goes on without adapters that it cannot load.

        ``link`` is not public yet: another's call that came first could take the slot of an adapter.
        """
        with suppress(EngineDeadError):  # gone again already: another will be built
            for adapter in self._admission.adapters:
                load = LoadAdapter(adapter.name, adapter.path, adapter.folder)
                self._repeat(link, load, functools.partial(self._lose, adapter))
            if self._weights is not None:
                self._repeat(link, self._weights)
            if self._admission.asleep:
                self._repeat(link, Sleep(tuple(self._admission.asleep)))

    def _repeat(
        self, link: CallLink, verb: Verb[object], unless: Callable[[BaseException], bool] = lambda error: False
    ) -> None:
        """Send ``verb``. The core is given up where it fails, unless that has been seen to or the core is gone."""
        number, future = link.answers.expect()

        def check(answered: Future[object]) -> None:
            error = answered.exception()
            if error is None or isinstance(error, EngineDeadError):
                return
            if not unless(error):  # what it would serve is not what was asked for
                link.give_up(f"{type(verb).__name__} failed on the engine that was built again: {error}")

        future.add_done_callback(check)
        link.send(Call(number, verb))

    def _lose(self, adapter: Adapter, error: BaseException) -> bool:
        """Go on without ``adapter``, if that is what ``error`` is about."""
        if not isinstance(error, CheckpointError | CapacityError):
            return False
        lost = f"adapter {adapter.name!r} is lost: the engine was built again, and could not load it: {error}"
        logger.error("%s; bring %s back, and load the adapter again", lost, adapter.path)
        self._note_adapter(adapter.name, (), lost)
        return True
