"""The loop in which a rank serves: what it submits while a step runs, and whose errors end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.engine.execution.ranks.rank_process import serve
from hardpoint.engine.processes.calls import Stop

SECONDS = 20.0


def serving(
    submit: Callable[[Any], Any], collect: Callable[[Any], Any], commands: SimpleQueue[Any]
) -> SimpleQueue[Any]:
    """The outputs that a rank collects while a thread runs its loop, and at last the loop's end or its error."""
    found: SimpleQueue[Any] = SimpleQueue()
    blueprint = SimpleNamespace(platform=SimpleNamespace(current=nullcontext))
    worker: Any = SimpleNamespace(runner=SimpleNamespace(submit=submit, collect=collect), blueprint=blueprint)

    def run() -> None:
        try:
            serve(worker, commands, found.put, found.put)
            found.put("ended")
        except Exception as error:
            found.put(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def test_a_step_is_submitted_while_the_one_before_it_runs() -> None:
    """The core sends a third step when it has the first one's output: the second must not keep the rank from it."""
    third, commands = threading.Event(), SimpleQueue[Any]()

    def submit(step: int) -> int:
        if step == 3:
            third.set()
        return step

    def collect(ticket: int) -> int:
        assert ticket != 2 or third.wait(SECONDS), "the third step was not submitted while the second ran"
        return 10 * ticket

    found = serving(submit, collect, commands)
    commands.put(1)
    commands.put(2)
    assert found.get(timeout=SECONDS) == 10
    commands.put(3)
    assert [found.get(timeout=2 * SECONDS) for _ in range(2)] == [20, 30]
    commands.put(Stop())
    assert found.get(timeout=SECONDS) == "ended"


def test_an_error_of_a_step_that_is_collected_ends_the_loop() -> None:
    def collect(ticket: int) -> int:
        raise ArithmeticError("no output")

    def submit(step: int) -> int:
        assert step == 1, "a step was submitted after the failure"
        return step

    commands = SimpleQueue[Any]()
    found = serving(submit, collect, commands)
    commands.put(1)
    error = found.get(timeout=SECONDS)
    assert isinstance(error, ArithmeticError)
    with pytest.raises(ArithmeticError, match="no output"):
        raise error
