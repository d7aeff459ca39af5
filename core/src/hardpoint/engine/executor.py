"""Where steps run: in this process, or (later, behind the same interface) in others."""

from __future__ import annotations

from typing import Protocol

from hardpoint.engine.runner import Runner, Ticket
from hardpoint.engine.step import StepInput, StepOutput


class Pending(Protocol):
    """A step on its way; a ``concurrent.futures.Future`` is one."""

    def result(self) -> StepOutput:
        """Wait for the step."""
        ...


class Executor(Protocol):
    """Runs steps in the order they are submitted."""

    def submit(self, step: StepInput) -> Pending:
        """Start ``step``; it may still run when this returns."""
        ...

    def shutdown(self, deadline: float) -> None:
        """End within ``deadline`` seconds; steps on their way may be lost."""
        ...


class InProcessExecutor:
    """One runner in this process."""

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner | None = runner

    def submit(self, step: StepInput) -> Pending:
        """Submit to the runner; asynchronous as far as the device is."""
        assert self._runner is not None, "submit after shutdown"
        return _Submitted(self._runner, self._runner.submit(step))

    def shutdown(self, deadline: float) -> None:
        """Drop the runner and what it holds."""
        self._runner = None


class _Submitted:
    def __init__(self, runner: Runner, ticket: Ticket) -> None:
        self._runner, self._ticket = runner, ticket

    def result(self) -> StepOutput:
        return self._runner.collect(self._ticket)
