"""Replicas whose ranks share experts: none of them can run a step without the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from hardpoint.config import EngineConfig
from hardpoint.engine.control import CaptureTogether, CheckIdle, MeetReplicas, R, Sleep, UpdateWeights, Verb, WakeUp
from hardpoint.engine.execution.ranks.rounds import CANNOT_GO_ON
from hardpoint.engine.remote.core_process import CLOSED
from hardpoint.engine.remote.muster import Muster
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.engine.remote.remote_control import CallLink
from hardpoint.engine.remote.remote_core import Link, RemoteCore
from hardpoint.engine.remote.replicas import Asked, Replicas
from hardpoint.engine.remote.server_starts import serve_starts
from hardpoint.engine.requests import RequestProgress
from hardpoint_plugin_api import EngineDeadError, EngineError

_CONSEQUENCES = ("with which this one shares experts", CANNOT_GO_ON)
"""Texts of errors that follow from another replica's."""


def needs_all_idle(verb: Verb[R], *, is_sleeping: bool) -> bool:
    """Whether all replicas that share experts must be idle, and do ``verb`` at once."""
    return isinstance(verb, Sleep | UpdateWeights) or (isinstance(verb, WakeUp) and is_sleeping)


def refuse_while(waits_for: str | None) -> None:
    """Raise EngineError while the verb of that name waits for other replicas."""
    if waits_for is not None:
        raise EngineError(
            f"{waits_for} is under way, which all replicas that share experts do at once; try again later"
        )


def done_by_all(verb: Verb[R], control: Callable[[Verb[object]], object], is_sleeping: Callable[[], bool]) -> R:
    """Have these replicas do ``verb`` as others are told to, by other processes; waits until all have been asked.

    ``control`` asks those of this process, none of which may get requests meanwhile. Raises EngineError while one
    has requests, before others are met; and where others do something else, or one of them fails.
    """
    name = type(verb).__name__
    control(CheckIdle())
    control(MeetReplicas(f"begins {name}"))
    try:
        answer = control(verb)
    except EngineDeadError:
        raise
    except Exception:
        with suppress(EngineError):  # the others say that this one failed
            control(MeetReplicas(f"failed at {name}"))
        raise
    control(MeetReplicas(f"did {name}"))
    if not is_sleeping():
        control(CaptureTogether())
    return cast(R, answer)


class SharingCore(RemoteCore):
    """One of the replicas. It fails when another does, and both are built again."""

    def _began_here(self, cause: str) -> bool:
        """See RemoteCore."""
        return cause != CLOSED and not any(text in cause for text in _CONSEQUENCES)

    def _repeat_calls(self, link: CallLink) -> None:
        """See RemoteControl."""
        super()._repeat_calls(link)
        if self._weights is not None and not self._admission.asleep:
            self._repeat(link, CaptureTogether())


class SharingReplicas(Replicas):
    """Replicas that sleep, and get new weights, all together: while no request is under way on any of them. All are
    built again where one fails."""

    _serve_together = True

    def __init__(self, start_link: Callable[[EngineConfig], Link], config: EngineConfig) -> None:
        """As for Replicas; ``start_link`` starts one core, as for RemoteCore."""
        self._muster, self._is_apart = Muster(start_link, len(config.local_replicas)), config.rendezvous is not None
        self._waits_for: str | None = None
        """The name of a verb that other servers are to do, too."""
        self._starts: object = None
        """Keeps the store of several servers."""
        super().__init__(partial(SharingCore, self._muster.start), config)
        try:
            self._starts = serve_starts(config)
        except BaseException:
            self.close()
            raise

    @property
    def recovery(self) -> RecoveryState:
        """See Replicas. A failure of one counts once."""
        return replace(super().recovery, num_restarts=max(core.recovery.num_restarts for core in self._cores))

    def control(self, verb: Verb[R]) -> R:
        """See Replicas. Raises EngineError for what needs every replica idle while one is not.

        Where some belong to other servers, it is done once all servers have been asked: see ``done_by_all``.
        """
        if not needs_all_idle(verb, is_sleeping=self.is_sleeping):
            return super().control(verb)
        if self._is_apart:
            return self._control_with_other_servers(verb)
        with self._placing:  # no requests come meanwhile
            super().control(CheckIdle())
            answer = super().control(verb)
            if not self.is_sleeping:
                super().control(CaptureTogether())
            return answer

    def _control_with_other_servers(self, verb: Verb[R]) -> R:
        """Do ``verb`` once all servers have been asked for it. Requests are refused meanwhile."""
        with self._placing:
            refuse_while(self._waits_for)
            self._waits_for = type(verb).__name__
        try:
            return done_by_all(verb, super().control, lambda: self.is_sleeping)
        finally:
            self._waits_for = None

    def _place(self, prompt: Sequence[int], key: object, rank: int | None, ask: Asked) -> RequestProgress:
        """See Replicas. Raises EngineError while any replica sleeps, or will: it could not take part in a step."""

        def ask_awake(core: RemoteCore) -> RequestProgress:
            refuse_while(self._waits_for)
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

    def _note_end(self, index: int, error: EngineDeadError) -> None:
        """See Replicas. Replicas that wait to be built again end, too."""
        self._muster.end()
        super()._note_end(index, error)

    def close(self) -> None:
        """See Replicas."""
        self._muster.end()
        super().close()
        self._muster.clean_up()
        self._starts = None
