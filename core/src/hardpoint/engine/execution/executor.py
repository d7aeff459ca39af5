"""Where steps run: what an engine core asks of it, and the simplest answer, one rank in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from hardpoint.engine.control import R, Verb
from hardpoint.engine.execution.rank_verbs import on_rank
from hardpoint.engine.execution.runner import Runner, Ticket
from hardpoint.engine.scheduling.step import StepInput, StepOutput

if TYPE_CHECKING:
    from hardpoint.engine.execution.worker import Worker, WorkerFacts


Current = Callable[[], AbstractContextManager[None]]
"""``Platform.current``."""


class Pending(Protocol):
    """A step on its way; a ``concurrent.futures.Future`` is one."""

    def result(self) -> StepOutput:
        """Wait for the step. Raises EngineDeadError where the ranks are gone, or hang."""
        ...


class Executor(Protocol):
    """Runs steps in the order they are submitted, on every rank. It survives every error that it raises except
    EngineDeadError."""

    @property
    def facts(self) -> WorkerFacts:
        """Facts about the ranks that the scheduler needs."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether other replicas, which share experts with this one, wait for its next step."""
        ...

    def submit(self, step: StepInput) -> Pending:
        """Start ``step``; it may still run when this returns."""
        ...

    def keep_up(self) -> None:
        """Start a step without requests: replicas that share experts with this one have steps to run, which all run."""
        ...

    def control(self, verb: Verb[R]) -> list[R]:
        """Have every rank do ``verb`` between steps, and return their answers. Raises what the first of them raised."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if the ranks are gone."""
        ...

    def when_lost(self, notify: Callable[[], None]) -> None:
        """Call ``notify``, from another thread, when the ranks are lost, and when this replica is awaited; both may
        have come about already."""
        ...

    def shutdown(self, deadline: float) -> None:
        """End within ``deadline`` seconds; steps on their way may be lost."""
        ...


class InProcessExecutor:
    """One rank in this process. Its device is made current for whichever thread calls."""

    is_awaited = False

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._runner: Runner | None = worker.runner
        self._current = worker.blueprint.platform.current

    @property
    def facts(self) -> WorkerFacts:
        """See Executor."""
        return self.worker.facts

    def submit(self, step: StepInput) -> Pending:
        """Submit to the runner; asynchronous as far as the device is."""
        assert self._runner is not None, "submit after shutdown"
        with self._current():
            return _Submitted(self._current, self._runner, self._runner.submit(step))

    def keep_up(self) -> None:
        """Nothing is shared with other replicas."""

    def control(self, verb: Verb[R]) -> list[R]:
        """Run a verb on the worker."""
        with self._current():
            return [on_rank(verb, self.worker)]

    def check(self) -> None:
        """This process does not go away."""

    def when_lost(self, notify: Callable[[], None]) -> None:
        """This process does not go away."""

    def shutdown(self, deadline: float) -> None:
        """Drop the runner with its weights and cache."""
        if self._runner is not None:
            self._runner = None
            with self._current():
                self.worker.close()


class _Submitted:
    def __init__(self, current: Current, runner: Runner, ticket: Ticket) -> None:
        self._current, self._runner, self._ticket = current, runner, ticket

    def result(self) -> StepOutput:
        with self._current():
            return self._runner.collect(self._ticket)
