"""Which captured graphs are dropped where few may be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.engine.execution.graphs.kept_graphs import Captured, KeptGraphs, shares_of, within
from hardpoint.engine.execution.graphs.shapes import Kind, ShapeRow, StepShape, shape_rows
from hardpoint_plugin_api import GraphEngine, StepLimits
from tests.support.recorder import RecordedCalls

DECODE, VERIFY = ShapeRow("full", (), ("logits",), queries=1), ShapeRow("full", (), ("token_logits",), queries=4)


class Graph:
    def run(self, update: Mapping[str, object] | None = None) -> Any:
        raise NotImplementedError


def put(kept: KeptGraphs, row: ShapeRow, *sizes: int) -> None:
    for size in sizes:
        shape = row.shape(size, row.ends[0])
        if kept.use((shape, ())) is None:
            kept.make_room(shape.kind)
            kept.put((shape, ()), Captured(Graph(), None))


def held(kept: KeptGraphs, row: ShapeRow, sizes: range = range(1, 20)) -> list[int]:
    return [size for size in sizes if kept.use((row.shape(size, row.ends[0]), ())) is not None]


def kept_graphs(most: int, decode: int, verify: int) -> KeptGraphs:
    return KeptGraphs(most, {DECODE.kind: decode, VERIFY.kind: verify})


def test_the_least_recently_used_of_a_kind_makes_room() -> None:
    kept = kept_graphs(4, 2, 2)
    put(kept, DECODE, 1, 2)
    put(kept, VERIFY, 1, 2, 1, 3)
    assert (held(kept, DECODE), held(kept, VERIFY)) == ([1, 2], [1, 3])


def test_a_share_that_is_not_used_is_anyones_until_it_is() -> None:
    kept = kept_graphs(4, 2, 2)
    put(kept, VERIFY, 1, 2, 3, 4)
    assert held(kept, VERIFY) == [1, 2, 3, 4]
    put(kept, DECODE, 1, 2, 3)
    assert (held(kept, DECODE), held(kept, VERIFY)) == ([2, 3], [3, 4])


def test_a_kind_without_a_share_takes_what_is_left() -> None:
    kept = kept_graphs(3, 2, 0)
    put(kept, DECODE, 1, 2)
    put(kept, VERIFY, 1, 2)
    assert (held(kept, DECODE), held(kept, VERIFY)) == ([1, 2], [2])
    full = kept_graphs(2, 2, 0)
    put(full, DECODE, 1, 2)
    put(full, VERIFY, 1)
    assert (held(full, DECODE), held(full, VERIFY)) == ([2], [1])


def rows_within(engine: GraphEngine, num_drafts: int) -> tuple[dict[Kind, int], dict[Kind, tuple[int, ...]]]:
    most = engine.max_graphs
    assert most is not None
    rows = [r for r in shape_rows(engine, StepLimits(max_tokens=256, max_requests=64), num_drafts) if r.sizes]
    shares = shares_of(rows, most)
    return shares, {row.kind: row.sizes for row in within(rows, shares)}


def test_decode_steps_get_their_share_first_and_verification_what_is_left() -> None:
    """Two draws for each size of decodes."""
    decode, verify = StepShape("full", 1, 1, 1, "greedy").kind, StepShape("full", 4, 1, 4, "token_logits").kind
    sizes = (1, 2, 4, 8, 16, 64)
    assert rows_within(RecordedCalls(sizes, max_graphs=18), 3) == (
        {decode: 12, verify: 6},
        {decode: sizes, verify: sizes},
    )
    assert rows_within(RecordedCalls(sizes, max_graphs=14), 3) == (
        {decode: 12, verify: 2},
        {decode: sizes, verify: (4, 64)},
    )
    assert rows_within(RecordedCalls(sizes, max_graphs=12), 3) == ({decode: 12, verify: 0}, {decode: sizes})
    assert rows_within(RecordedCalls(None, max_graphs=9), 3)[0] == {decode: 4, verify: 4}
