"""The ranks of a replica that shares experts with others: every step is one of all replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hardpoint.config import EngineConfig
from hardpoint.engine.control import MeetReplicas, R, Verb
from hardpoint.engine.execution.executor import Executor, Pending
from hardpoint.engine.execution.graphs.shapes import captured_tokens
from hardpoint.engine.execution.ranks.meeting import meet
from hardpoint.engine.execution.ranks.rounds import CANNOT_GO_ON, Rounds, Share, captured_by_all
from hardpoint.engine.scheduling.step import StepInput, StepOutput
from hardpoint_plugin_api import EngineDeadError

if TYPE_CHECKING:
    from hardpoint.engine.execution.worker import WorkerFacts

logger = logging.getLogger(__name__)

_REASON_SECONDS = 5.0
"""For another replica to end, where these ranks cannot go on: it first waits for its own ranks to say why."""


class LockStepExecutor:
    """An Executor over the ranks of this replica, which submits a step once all replicas have one."""

    def __init__(self, config: EngineConfig, start: Callable[[], Executor]) -> None:
        """Meet the other replicas, and ``start`` the ranks of this one, which meet theirs.

        Raises EngineDeadError, before anything is loaded, where a replica does not come; and what ``start`` raises.
        """
        topology = config.topology
        self._is_launched = config.executor_kind == "torchrun"
        elsewhere = [n for n in range(topology.data) if topology.here is not None and n not in topology.here]
        self._rounds = Rounds(topology.replica, meet(config), float(config.step_timeout), elsewhere)
        try:
            self._ranks = start()
        except BaseException:
            self._rounds.leave(is_lost=True)
            raise
        self._ranks.when_lost(self._rounds.break_off)
        assert self.facts.limits.max_requests is not None
        # The slot behind all requests' is that of padding, see Runner.
        self._empty = StepInput.empty(self.facts.limits.max_requests, len(self.facts.geometry.retentions))

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
        with _explained(self._rounds):
            self._ranks.check()
            with self._own_reason():
                shares = self._rounds.agree(Share(step.num_tokens, captured_tokens(self.facts.captured, step)))
            captured = captured_by_all(shares)
            tokens = tuple(captured or share.tokens for share in shares)
            submitted = self._ranks.submit(replace(step, replica_tokens=tokens, captured_tokens=captured))
        return _SharedStep(submitted, self._rounds)

    def keep_up(self) -> None:
        """See Executor. Returns before the empty step has run: no request is in it."""
        self.submit(self._empty)

    def control(self, verb: Verb[R]) -> list[R]:
        """See Executor. MeetReplicas is not for the ranks: other cores are met."""
        if isinstance(verb, MeetReplicas):
            with _explained(self._rounds), self._own_reason():
                self._rounds.meet(verb.said, self.keep_up)
            return []
        return self._ranks.control(verb)

    def check(self) -> None:
        """See Executor. Raises EngineDeadError where another replica is gone, too."""
        with _explained(self._rounds):
            self._ranks.check()
        self._rounds.check()

    def when_lost(self, notify: Callable[[], None]) -> None:
        """See Executor."""

        def told() -> None:
            self._rounds.break_off()
            notify()

        self._ranks.when_lost(told)
        self._rounds.when_begun(notify)

    @contextmanager
    def _own_reason(self) -> Iterator[None]:
        """Where the replicas cannot go on, and this one's ranks are lost, raise EngineDeadError with their reason."""
        try:
            yield
        except EngineDeadError:
            self._ranks.check()
            raise

    def shutdown(self, deadline: float) -> None:
        """See Executor. Where the ranks are lost, the other replicas end as well.

        A replica that torchrun started takes part in the steps of the others until all are shut down: each is closed
        where its own script gets to the end.
        """
        try:
            self._ranks.check()
            if self._is_launched and deadline:
                self._finish()
            self._ranks.check()
        except EngineDeadError:
            self._rounds.leave(is_lost=True)
        else:
            self._rounds.leave()
        self._ranks.shutdown(deadline)

    def _finish(self) -> None:
        """Take part in the steps of the other replicas until all are shut down. Raises EngineDeadError where one is
        lost: those that go on must hear that something failed, not that the engine was closed."""
        try:
            self._rounds.finish(self.keep_up)
            self._rounds.check()
        except EngineDeadError as error:
            logger.warning("this replica is closed before the others are: %s", error)
            raise


@dataclass(frozen=True)
class _SharedStep:
    """A step of all replicas, which ``ranks`` of this one run."""

    ranks: Pending
    rounds: Rounds

    def result(self) -> StepOutput:
        """See Pending."""
        with _explained(self.rounds):
            return self.ranks.result()


@contextmanager
def _explained(rounds: Rounds) -> Iterator[None]:
    """Where a replica's ranks cannot go on, name in the error the other replica that is gone.

    A replica whose own rank is lost says so at once, even while it waits for this one's step.
    """
    try:
        yield
    except EngineDeadError as error:
        if CANNOT_GO_ON in str(error) and (lost := rounds.lost_within(_REASON_SECONDS)):
            raise EngineDeadError(f"{lost}: {error}") from error
        raise
