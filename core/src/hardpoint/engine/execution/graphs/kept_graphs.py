"""Which captured graphs are kept where a graph engine keeps few: each kind of step has a share of its own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from hardpoint.engine.execution.forward import PiecewiseStep
from hardpoint.engine.execution.graphs.shapes import Kind, ShapeRow, StepShape
from hardpoint_plugin_api import CapturedGraph

GraphKey = tuple[StepShape, Hashable]
"""A graph's shape, and the compatibility tokens of its step's metadata."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph. A piecewise one reads the metadata of each run from ``step``."""

    graph: CapturedGraph
    step: PiecewiseStep | None


class KeptGraphs:
    """At most ``most`` graphs. The least recently used makes room, but for kinds that have no more than their share.

    So decode steps keep their graphs, however many shapes of verified drafts come by. Other kinds may use the part of a
    share that a kind leaves unused.
    """

    def __init__(self, most: int, shares: Mapping[Kind, int]) -> None:
        """``shares`` add up to ``most`` or less."""
        self._most, self._shares = most, dict(shares)
        self._graphs: OrderedDict[GraphKey, Captured] = OrderedDict()
        self._shapes: Counter[StepShape] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def graphs(self) -> list[CapturedGraph]:
        """All graphs, the least recently used first."""
        return [captured.graph for captured in self._graphs.values()]

    def has(self, shape: StepShape) -> bool:
        """Whether there is a graph of ``shape``, for whatever compatibility tokens."""
        return self._shapes[shape] > 0

    def use(self, key: GraphKey) -> Captured | None:
        """The graph of ``key``, which is now the most recently used; None where there is none."""
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
        return found

    def make_room(self, kind: Kind) -> None:
        """Drop graphs until one more of ``kind`` may be put."""
        while len(self._graphs) >= self._most:
            dropped = self._next_dropped(kind)
            del self._graphs[dropped]
            self._shapes[dropped[0]] -= 1

    def put(self, key: GraphKey, captured: Captured) -> None:
        """Keep a graph, for which there is room."""
        self._graphs[key] = captured
        self._shapes[key[0]] += 1

    def clear(self) -> None:
        """Drop all."""
        self._graphs.clear()
        self._shapes.clear()

    def _next_dropped(self, kind: Kind) -> GraphKey:
        numbers: dict[Kind, int] = {kind: 1}
        for shape, _ in self._graphs:
            numbers[shape.kind] = numbers.get(shape.kind, 0) + 1
        over = (key for key in self._graphs if numbers[key[0].kind] > self._shares.get(key[0].kind, 0))
        return next(over, next(iter(self._graphs)))  # for a kind without a share, where all others have just theirs


def shares_of(rows: Sequence[ShapeRow], most: int) -> dict[Kind, int]:
    """How many graphs each kind of step keeps for sure, ``most`` in all: as many as are captured ahead, first come
    first served; kinds whose sizes are not listed divide the rest."""
    shares, left = {}, most
    for row in rows:
        shares[row.kind] = min(row.num_ahead, left)
        left -= shares[row.kind]
    others = [row for row in rows if not row.listed]
    return shares | {row.kind: left // len(others) for row in others}


def within(rows: Sequence[ShapeRow], shares: Mapping[Kind, int]) -> list[ShapeRow]:
    """``rows`` with as many of the listed sizes as their shares hold, evenly spaced up to the largest."""
    kept = []
    for row in rows:
        each = len(row.draws) or 1
        number = min(len(row.sizes), shares[row.kind] // each) if row.listed else len(row.sizes)
        sizes = tuple(row.sizes[(i + 1) * len(row.sizes) // number - 1] for i in range(number))
        if sizes:
            kept.append(replace(row, sizes=sizes))
    return kept
