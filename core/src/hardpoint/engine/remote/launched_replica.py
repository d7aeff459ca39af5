"""A replica that torchrun started, and that shares experts with those of other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hardpoint.config import EngineConfig
from hardpoint.engine.control import R, Verb
from hardpoint.engine.remote.remote_core import CLOSE_SECONDS, Link, RemoteCore, ThreadLink
from hardpoint.engine.remote.sharing_replicas import done_by_all, needs_all_idle, refuse_while
from hardpoint.engine.requests import AdmittedRequest, RequestProgress


class LaunchedLink(ThreadLink):
    """A core in a thread of this process, which takes part in the steps of the other replicas until all are closed."""

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """See Link. Waits for the other replicas however long they take, unless ``deadline`` is 0."""
        super().close(threading.TIMEOUT_MAX if deadline and self.lost is None else 0)


class LaunchedReplica(RemoteCore):
    """The replica of this process. It knows nothing of the others' requests."""

    def __init__(self, start_link: Callable[[EngineConfig], Link], config: EngineConfig) -> None:
        """See RemoteCore."""
        self._placing = threading.Lock()  # held for moments
        self._waits_for: str | None = None
        """The name of a verb that other processes are to do, too."""
        super().__init__(start_link, config)

    def control(self, verb: Verb[R]) -> R:
        """See RemoteControl. A verb that needs every replica idle is done once all scripts have asked for it.

        Raises EngineError for that while this one has requests, and where others do something else.
        """
        if not needs_all_idle(verb, is_sleeping=self.is_sleeping):
            return super().control(verb)
        with self._placing:
            refuse_while(self._waits_for)
            self._waits_for = type(verb).__name__
        try:
            return done_by_all(verb, super().control, lambda: self.is_sleeping)
        finally:
            self._waits_for = None

    def _queue(self, asked: AdmittedRequest) -> RequestProgress:
        """See RemoteCore. Raises EngineError while others are waited for."""
        with self._placing:
            refuse_while(self._waits_for)
            return super()._queue(asked)
