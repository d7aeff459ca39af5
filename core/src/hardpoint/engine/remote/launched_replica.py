"""A replica that torchrun started, and that shares experts with those of other processes."""

from __future__ import annotations

import threading

from hardpoint.engine.control import R, Verb
from hardpoint.engine.remote.remote_core import CLOSE_SECONDS, RemoteCore, ThreadLink
from hardpoint.engine.remote.sharing_replicas import needs_all_idle
from hardpoint_plugin_api import EngineError


class LaunchedLink(ThreadLink):
    """A core in a thread of this process, which takes part in the steps of the other replicas until all are closed."""

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """See Link. Waits for the other replicas however long they take, unless ``deadline`` is 0."""
        super().close(threading.TIMEOUT_MAX if deadline and self.lost is None else 0)


class LaunchedReplica(RemoteCore):
    """The replica of this process. It knows nothing of the others' requests."""

    def control(self, verb: Verb[R]) -> R:
        """See RemoteControl. Raises EngineError for what needs every replica idle."""
        if needs_all_idle(verb, is_sleeping=self.is_sleeping):
            raise EngineError(
                f"{type(verb).__name__} needs all replicas that share experts idle, and torchrun's others are not seen "
                "from here; use --executor mp or ray"
            )
        return super().control(verb)
