"""The ranks of a replica that shares experts with others: every step is one of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.config import EngineConfig
from hardpoint.engine.control import R, Verb
from hardpoint.engine.execution.executor import Executor, Pending
from hardpoint.engine.execution.graphs.shapes import captured_tokens
from hardpoint.engine.execution.ranks.rounds import Rounds, Share, captured_by_all
from hardpoint.engine.scheduling.step import StepInput
from hardpoint_plugin_api import EngineDeadError

if TYPE_CHECKING:
    from hardpoint.engine.execution.worker import WorkerFacts


class LockStepExecutor:
    """An Executor over the ranks of this replica, ``ranks``, which submits a step once all replicas have one."""

    def __init__(self, config: EngineConfig, ranks: Executor) -> None:
        """Meet the other replicas, whose ranks have met these. Raises EngineDeadError where one does not come."""
        self._ranks, topology, patience = ranks, config.topology, float(config.core_start_timeout)
        assert ranks.facts.limits.max_requests is not None
        # The slot behind all requests' is that of padding, see Runner.
        self._empty = StepInput.empty(ranks.facts.limits.max_requests, len(ranks.facts.geometry.retentions))
        try:
            seconds = float(config.step_timeout)
            self._rounds = Rounds.join(topology.replica, topology.data, Path(config.meeting), patience, seconds)
        except BaseException:
            ranks.shutdown(0)
            raise

    @property
    def facts(self) -> WorkerFacts:
        """See Executor."""
        return self._ranks.facts

    @property
    def is_awaited(self) -> bool:
        """See Executor."""
        return self._rounds.has_begun

    def submit(self, step: StepInput) -> Pending:
        """See Executor. Waits for the other replicas' steps, and tells the ranks how many tokens they have.

        All are padded to one number of tokens where each replica has graphs of that size.
        """
        self._ranks.check()
        shares = self._rounds.agree(Share(step.num_tokens, captured_tokens(self.facts.captured, step)))
        captured = captured_by_all(shares)
        tokens = tuple(captured or share.tokens for share in shares)
        return self._ranks.submit(replace(step, replica_tokens=tokens, captured_tokens=captured))

    def keep_up(self) -> None:
        """See Executor. Returns before the empty step has run: no request is in it."""
        self.submit(self._empty)

    def control(self, verb: Verb[R]) -> list[R]:
        """See Executor."""
        return self._ranks.control(verb)

    def check(self) -> None:
        """See Executor. Raises EngineDeadError where another replica is gone, too."""
        self._ranks.check()
        self._rounds.check()

    def when_lost(self, notify: Callable[[], None]) -> None:
        """See Executor."""
        self._ranks.when_lost(notify)
        self._rounds.when_begun(notify)

    def shutdown(self, deadline: float) -> None:
        """See Executor. Where the ranks are lost, the other replicas end as well."""
        try:
            self._ranks.check()
        except EngineDeadError:
            self._rounds.leave(is_lost=True)
        else:
            self._rounds.leave()
        self._ranks.shutdown(deadline)
