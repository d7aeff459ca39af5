"""The contract of graph engines, whether they capture, record, compile or just call: for a subclass per engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.kernel_calls import can_repeat
from hardpoint_plugin_api import GraphEngine, PlatformError


def swish(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x * torch.sigmoid(x))
    return out.sum(-1, keepdim=True) + 1


class GraphEngineContract:
    """Subclasses give the fixtures ``graphs`` (the engine) and ``device`` (where its buffers lie)."""

    def test_a_run_reads_what_the_buffers_hold_now(self, graphs: GraphEngine, device: torch.device) -> None:
        x, out = torch.zeros(4, 6, device=device), torch.zeros(4, 6, device=device)
        prepared = graphs.prepare("swish", swish, {"x": x, "out": out})
        for seed in range(3):
            fresh = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            x.copy_(fresh)
            result = prepared.run()
            torch.testing.assert_close(out.cpu(), fresh * torch.sigmoid(fresh))
            torch.testing.assert_close(result.cpu(), (fresh * torch.sigmoid(fresh)).sum(-1, keepdim=True) + 1)

    def test_preparing_changes_no_buffer(self, graphs: GraphEngine, device: torch.device) -> None:
        x, count = torch.full((3,), 2.0, device=device), torch.zeros(1, dtype=torch.int64, device=device)

        def step(x: torch.Tensor, count: torch.Tensor) -> None:
            x.mul_(2)
            count += 1

        prepared = graphs.prepare("step", step, {"x": x, "count": count})
        assert (x.tolist(), count.tolist()) == ([2.0] * 3, [0])
        for _ in range(3):
            prepared.run()
        assert (x.tolist(), count.tolist()) == ([16.0] * 3, [3])

    def test_buffers_may_be_views(self, graphs: GraphEngine, device: torch.device) -> None:
        whole = torch.arange(12.0, device=device).view(3, 4)

        def step(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            row += 1
            return column.clone()

        prepared = graphs.prepare("views", step, {"row": whole[1], "column": whole[:, 2]})
        assert prepared.run().tolist() == [2.0, 7.0, 10.0]
        whole.zero_()
        assert prepared.run().tolist() == [0.0, 1.0, 0.0]

    def test_host_parameters_are_bound_anew_for_one_run(self, graphs: GraphEngine, device: torch.device) -> None:
        x = torch.arange(4.0, device=device)

        def step(x: torch.Tensor, scale: float, shift: int) -> torch.Tensor:
            return x * scale + shift

        prepared = graphs.prepare("scaled", step, {"x": x, "scale": 2.0, "shift": 1})
        assert prepared.run().tolist() == [1.0, 3.0, 5.0, 7.0]
        assert prepared.run({"scale": -1.0}).tolist() == [1.0, 0.0, -1.0, -2.0]
        assert prepared.run({"shift": 10, "scale": 0.5}).tolist() == [10.0, 10.5, 11.0, 11.5]
        assert prepared.run().tolist() == [1.0, 3.0, 5.0, 7.0]

    def test_graphs_do_not_disturb_each_other(self, graphs: GraphEngine, device: torch.device) -> None:
        x, y = torch.ones(4, device=device), torch.ones(8, device=device)
        first = graphs.prepare(4, lambda x: torch.cumsum(x, 0), {"x": x})
        second = graphs.prepare(8, lambda x: torch.cumsum(x * 2, 0), {"x": y})
        a, b = first.run(), second.run()
        x.fill_(3.0)
        assert b.tolist() == [2.0 * i for i in range(1, 9)]
        assert first.run().tolist() == [3.0, 6.0, 9.0, 12.0]
        assert a.shape == (4,)

    def test_results_may_have_any_structure(self, graphs: GraphEngine, device: torch.device) -> None:
        def step(x: torch.Tensor) -> dict[str, Any]:
            largest, where = x.max(-1)
            return {"largest": largest, "rest": [where, None, "text"]}

        x = torch.tensor([[1.0, 5.0], [7.0, 2.0]], device=device)
        result = graphs.prepare("nested", step, {"x": x}).run()
        assert result["largest"].tolist() == [5.0, 7.0]
        assert result["rest"][0].tolist() == [1, 0]
        assert result["rest"][1:] == [None, "text"]


class RecordingContract(GraphEngineContract):
    """The contract of engines that record: the ones with ``max_graphs`` other than 0.

    ``sees_waits``: whether the engine can tell that a function waits for the device.
    """

    sees_waits: ClassVar[bool] = True

    def test_results_stay_where_they_are(self, graphs: GraphEngine, device: torch.device) -> None:
        x = torch.ones(5, device=device)
        prepared = graphs.prepare("square", lambda x: x * x + 1, {"x": x})
        first = prepared.run()
        address = first.data_ptr()
        x.fill_(3.0)
        assert prepared.run().data_ptr() == address
        assert first.tolist() == [10.0] * 5, "the same tensor holds the new result"

    @pytest.mark.parametrize(
        "waits",
        [
            lambda x: x.sum().item(),
            lambda x: x.tolist(),
            lambda x: x.cpu(),
            lambda x: x[x > 0],
            lambda x: torch.nonzero(x),
            lambda x: bool((x > 0).any()),
            lambda x: torch.tensor([1.0, 2.0]).to(x.device) + x[:2],
        ],
        ids=["item", "tolist", "cpu", "mask", "nonzero", "bool", "from-host"],
    )
    def test_a_wait_for_the_device_is_refused(
        self, graphs: GraphEngine, device: torch.device, waits: Callable[[torch.Tensor], object]
    ) -> None:
        if not self.sees_waits:
            pytest.skip("this recorder takes waits for calls like any other")
        x = torch.ones(4, device=device)
        with pytest.raises(PlatformError, match="'waiting'"):
            graphs.prepare("waiting", waits, {"x": x})
        assert x.tolist() == [1.0] * 4
        prepared = graphs.prepare("after", lambda x: x + 1, {"x": x})
        assert prepared.run().tolist() == [2.0] * 4, "the engine works on"

    def test_an_error_of_the_functions_own_comes_through(self, graphs: GraphEngine, device: torch.device) -> None:
        x = torch.ones(4, device=device)

        def broken(x: torch.Tensor) -> None:
            x += 1
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            graphs.prepare("broken", broken, {"x": x})
        assert graphs.prepare("after", lambda x: x + 1, {"x": x}).run().tolist() == [2.0] * 4

    def test_what_interrupts_is_called_by_each_run(self, graphs: GraphEngine, device: torch.device) -> None:
        if not graphs.piece_sizes:
            pytest.skip("this engine prepares nothing in pieces")
        x, factor = torch.ones(4, device=device), [2.0]

        def step(x: torch.Tensor) -> torch.Tensor:
            before = x + 1
            behind = torch.empty_like(before)

            def call() -> None:
                behind.copy_(torch.tensor([value * factor[0] for value in before.tolist()]))

            graphs.interrupt(call)
            return behind - 1

        prepared = graphs.prepare("pieces", step, {"x": x})
        assert prepared.run().tolist() == [3.0] * 4
        x.copy_(torch.arange(4.0))
        factor[0] = 10.0
        assert prepared.run().tolist() == [9.0, 19.0, 29.0, 39.0], "it waits for the device, and has changed since"
        factor[0] = 0.0
        assert prepared.run().tolist() == [-1.0] * 4

    def test_what_is_opaque_is_called_by_each_run(self, graphs: GraphEngine, device: torch.device) -> None:
        """On tensors that the function made, wherever these are when it runs, the result's own memory among them."""
        if not can_repeat(graphs):
            pytest.skip("this engine takes no opaque calls")
        x, calls = torch.ones(4, device=device), []

        def call(tensors: dict[str, torch.Tensor], factor: float) -> None:
            calls.append(factor)
            tensors["behind"].copy_(torch.tensor([value * factor for value in tensors["before"].tolist()]))

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = x + 1
            behind = torch.empty_like(before)
            graphs.opaque(call, {"before": before, "behind": behind}, 2.0)
            return behind, behind - 1

        prepared = graphs.prepare("opaque", step, {"x": x})
        calls.clear()
        for start in (0.0, 3.0):
            x.copy_(torch.arange(start, start + 4))
            doubled, less = prepared.run()
            assert doubled.tolist() == [2 * (start + i + 1) for i in range(4)]
            assert less.tolist() == [2 * (start + i + 1) - 1 for i in range(4)]
        assert calls == [2.0, 2.0]

    def test_memory_around_opaque_calls_is_used_again(self, graphs: GraphEngine, device: torch.device) -> None:
        if not can_repeat(graphs) or GraphEngine.opaque is type(graphs).opaque:
            pytest.skip("this engine keeps the memory around opaque calls")
        x, rounds = torch.ones(1 << 22, device=device), 12

        def step(x: torch.Tensor) -> torch.Tensor:
            for _ in range(rounds):
                doubled = x * 2
                behind = torch.empty(1 << 22, device=device)
                graphs.opaque(lambda doubled, behind: behind.copy_(doubled[:2].repeat(1 << 21)), doubled, behind)
                x = behind.view(2, -1)[1] / 2
                x = torch.cat([x, x]) + 1
            return x.view(-1, 1 << 20).amax(1)

        prepared = graphs.prepare("rounds", step, {"x": x})
        for first in (1.0, 5.0):
            x.fill_(first)
            assert prepared.run().tolist() == [first + rounds] * 4
        assert graphs.nbytes < rounds * x.nbytes, "far less than all rounds together"

    def test_a_transient_result_is_there_until_the_next_run(self, graphs: GraphEngine, device: torch.device) -> None:
        x = torch.ones(3, 5, device=device)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            large = x * 3
            return graphs.transient(large), large.sum(-1)

        kept = [graphs.prepare(number, step, {"x": x}) for number in range(2)]
        for value, prepared in enumerate([*kept, *kept]):
            x.fill_(value)
            large, sums = prepared.run()
            assert large.shape == (3, 5)
            assert large.dtype == x.dtype
            assert large.tolist() == [[3.0 * value] * 5] * 3
            assert sums.tolist() == [15.0 * value] * 3

    def test_no_more_graphs_than_it_says(self, graphs: GraphEngine, device: torch.device) -> None:
        if graphs.max_graphs is None:
            pytest.skip("this engine knows no limit")
        x = torch.ones(2, device=device)
        kept = [graphs.prepare(i, lambda x: x + 1, {"x": x}) for i in range(graphs.max_graphs)]
        with pytest.raises(PlatformError, match=rf"{graphs.max_graphs} .*'one more'"):
            graphs.prepare("one more", lambda x: x + 1, {"x": x})
        kept.pop()
        assert graphs.prepare("one more", lambda x: x + 1, {"x": x}).run().tolist() == [2.0, 2.0]
