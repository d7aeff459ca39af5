"""Replicas whose ranks share experts: none of them can run a step without the others."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Sequence
from tempfile import mkdtemp

from hardpoint.config import EngineConfig
from hardpoint.engine.control import CaptureTogether, CheckIdle, R, Sleep, UpdateWeights, Verb, WakeUp
from hardpoint.engine.remote.remote_core import RemoteCore
from hardpoint.engine.remote.replicas import Asked, Replicas
from hardpoint.engine.requests import RequestProgress
from hardpoint_plugin_api import EngineDeadError, EngineError

_CONSEQUENCES = ("with which this one shares experts", "cannot go on: RankLostError")
"""Texts of errors that follow from another replica's."""


class SharingReplicas(Replicas):
    """Replicas that sleep, and get new weights, all together: while no request is under way on any of them."""

    def __init__(self, start: Callable[[EngineConfig], RemoteCore], config: EngineConfig) -> None:
        """As for Replicas; ``start`` is given configs with a folder where the replicas meet."""
        folder = mkdtemp(prefix="hardpoint-replicas-")
        self._clean_up = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        super().__init__(lambda own: start(own.meeting_in(folder)), config)

    def control(self, verb: Verb[R]) -> R:
        """See Replicas. Raises EngineError for what needs every replica idle while one is not."""
        needs_all_idle = isinstance(verb, Sleep | UpdateWeights) or (isinstance(verb, WakeUp) and self.is_sleeping)
        if not needs_all_idle:
            return super().control(verb)
        with self._placing:  # no requests come meanwhile
            super().control(CheckIdle())
            answer = super().control(verb)
            if not self.is_sleeping:
                super().control(CaptureTogether())
            return answer

    def _place(self, prompt: Sequence[int], key: object, rank: int | None, ask: Asked) -> RequestProgress:
        """See Replicas. Raises EngineError while any replica sleeps: it could not take part in a step."""

        def ask_awake(core: RemoteCore) -> RequestProgress:
            if asleep := self.asleep:
                raise EngineError(f"the engine sleeps, without its {', '.join(sorted(asleep))}; wake it up first")
            return ask(core)

        return super()._place(prompt, key, rank, ask_awake)

    def _verdict(self, index: int, error: EngineDeadError) -> EngineDeadError:
        """See Replicas. A replica that ended since it missed another says less than that one."""
        for other, core in enumerate(self._cores):
            if any(text in str(error) for text in _CONSEQUENCES):
                try:
                    core.check()
                except EngineDeadError as own:
                    index, error = other, own
        return super()._verdict(index, error)

    def close(self) -> None:
        """See Replicas."""
        super().close()
        self._clean_up()
