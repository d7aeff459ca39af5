"""When experts are balanced, and since when loads count."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hardpoint.config import EngineConfig
from hardpoint.engine.execution.executor import Executor
from hardpoint.engine.execution.expert_verbs import BalanceLayer, ForgetLoads
from hardpoint.engine.execution.ranks.expert_balancing import ExpertBalancing

LAYERS = 3


class Loads:
    """Ranks that count steps instead of tokens, for each layer, and note the count with which each is balanced."""

    def __init__(self) -> None:
        self.steps = [0] * LAYERS
        self.seen: list[tuple[int, int]] = []

    def control(self, verb: object) -> list[None]:
        if isinstance(verb, ForgetLoads):
            self.steps = [0] * LAYERS
        elif isinstance(verb, BalanceLayer) and verb.number < LAYERS:
            self.seen.append((verb.number, self.steps[verb.number]))
            self.steps[verb.number] = 0
            return cast("list[None]", [Balanced()])
        return [None]


class Balanced:
    """The answer of a rank for a layer."""

    before = after = 1.0
    nbytes = num_moved = 0


def balanced(interval: int, window: int, steps: int) -> list[tuple[int, int]]:
    """The layers that are balanced within so many steps, and of how many steps each knows the loads."""
    config: Any = EngineConfig.create(
        model="demo",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_step_interval=interval,
        eplb_window_size=window,
    )
    ranks = Loads()
    balancing = ExpertBalancing(cast(Executor, ranks), config)
    for _ in range(steps):
        balancing.between_steps()
        ranks.steps = [count + 1 for count in ranks.steps]
    return ranks.seen


@pytest.mark.parametrize(
    ("interval", "window", "expected"),
    [
        (20, 10, [(0, 10), (1, 11), (2, 12), (0, 10), (1, 11), (2, 12)]),
        (20, 20, [(0, 20), (1, 21), (2, 22), (0, 20), (1, 20), (2, 20)]),
        (20, 19, [(0, 19), (1, 20), (2, 21), (0, 17), (1, 18), (2, 19)]),
    ],
    ids=["a window", "all steps", "a window that begins within the round"],
)
def test_loads_of_the_window_count(interval: int, window: int, expected: list[tuple[int, int]]) -> None:
    assert balanced(interval, window, 2 * interval + LAYERS + 1) == expected


def test_a_round_ends_before_the_next_begins() -> None:
    """Where there are more layers than steps between two rounds."""
    layers = [layer for layer, _ in balanced(2, 1, 24)]
    assert len(layers) >= 4 * LAYERS
    assert layers == [number % LAYERS for number in range(len(layers))]
