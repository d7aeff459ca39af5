"""The graphs that are captured before steps need them: which ones the start waits for, and the order of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hardpoint.engine.execution.graphs.shapes import Layout, StepShape

Buffers = tuple[Layout, bool]
"""The layout of a step's buffers, and whether adapters are among them."""

_SPACING = 16
"""Sizes that the start waits for lie at least so many times apart. Few are captured, and until the others are there,
which takes seconds, a step is padded to at most about so many times its size."""


def first_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that the start waits for, ascending like ``sizes``.

    The largest is one. Below it, each next one is at most a sixteenth of the one before.
    """
    found: list[int] = []
    for size in reversed(sizes):
        if not found or size * _SPACING <= found[-1]:
            found.append(size)
    return tuple(reversed(found))


def buffers_of(shape: StepShape) -> Buffers:
    """The buffers that graphs of ``shape`` read; shapes that differ in their ends share them."""
    return shape.layout, shape.adapted


@dataclass(frozen=True)
class PlannedGraph:
    """A graph to capture, and for how many lengths of sequences it is compared with eager runs."""

    shape: StepShape
    num_lengths: int


class LateGraphs:
    """Graphs that the start left out, and how many steps have missed one of each layout since."""

    def __init__(self) -> None:
        self._planned: dict[StepShape, PlannedGraph] = {}
        self._left: Counter[Buffers] = Counter()
        self._missed: Counter[Buffers] = Counter()
        self._given_up: set[StepShape] = set()

    def __len__(self) -> int:
        return len(self._planned)

    def has(self, shape: StepShape) -> bool:
        """Whether any graph over the buffers of ``shape`` is left, or given up."""
        return self._left.get(buffers_of(shape), 0) > 0  # ten times as fast as asking a Counter for what it lacks

    def is_given_up(self, shape: StepShape) -> bool:
        """Whether the graph of ``shape`` failed."""
        return shape in self._given_up

    def add(self, graphs: Iterable[PlannedGraph]) -> None:
        """Note graphs behind the others, in the order in which they are to be captured."""
        self._planned |= {graph.shape: graph for graph in graphs}
        self._left = Counter(map(buffers_of, (*self._planned, *self._given_up)))

    def discard(self, shape: StepShape) -> None:
        """Forget a graph: it was captured, or cannot be."""
        if self._planned.pop(shape, None) is not None:
            self._left[buffers_of(shape)] -= 1

    def give_up(self, shape: StepShape) -> None:
        """Capture no graph of ``shape``: it failed."""
        self.discard(shape)
        self._given_up.add(shape)
        self._left[buffers_of(shape)] += 1

    def clear(self) -> None:
        """Forget all."""
        self._given_up.clear()
        self._planned.clear()
        self._left.clear()
        self._missed.clear()

    def miss(self, shape: StepShape) -> None:
        """Count a step that a graph over the buffers of ``shape`` would serve best."""
        self._missed[buffers_of(shape)] += 1

    def next(self, least_missed: int) -> PlannedGraph | None:
        """The graph that most steps have missed, the first one of equals; None where fewer than ``least_missed`` did.

        Ranks run the same steps, so that all of them return the same.
        """
        best = max(self._planned, key=self._times_missed, default=None)
        return None if best is None or self._times_missed(best) < least_missed else self._planned[best]

    def _times_missed(self, shape: StepShape) -> int:
        return self._missed[buffers_of(shape)]
