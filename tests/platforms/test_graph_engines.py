"""The eager graph engine, and the CPU plugin's recorded lists, against the contract of graph engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hardpoint.platforms.host_parameters import rebinds
from hardpoint_plugin_api import EagerGraphEngine, GraphEngine, PlatformError
from tests.support.graph_contract import GraphEngineContract, RecordingContract


class TestEager(GraphEngineContract):
    """On the host."""

    @pytest.fixture
    def graphs(self) -> GraphEngine:
        return EagerGraphEngine()

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")


class TestRecordedListsOfCpus(RecordingContract):
    """On the host, whose memory is the device's: to copy from there, or there, waits for nothing."""

    @pytest.fixture
    def graphs(self) -> GraphEngine:
        pytest.importorskip(
            "hardpoint_cpu._native", reason="hardpoint-cpu has no compiled kernels here", exc_type=ImportError
        )
        from hardpoint_cpu.recorded_list import RecordedLists

        return RecordedLists()

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")

    @pytest.mark.parametrize(
        "waits",
        [
            lambda x: x.sum().item(),
            lambda x: x.tolist(),
            lambda x: x.numpy(),
            lambda x: x[x > 0],
            lambda x: torch.nonzero(x),
            lambda x: bool((x > 0).any()),
        ],
        ids=["item", "tolist", "numpy", "mask", "nonzero", "bool"],
    )
    def test_a_wait_for_the_device_is_refused(
        self, graphs: GraphEngine, device: torch.device, waits: Callable[[torch.Tensor], object]
    ) -> None:
        super().test_a_wait_for_the_device_is_refused(graphs, device, waits)

    def test_what_graphs_take_goes_with_them(self, graphs: GraphEngine, device: torch.device) -> None:
        """Memory between operators stays with the engine; results and records are each graph's own."""
        assert graphs.nbytes == 0
        x = torch.ones(1024, 1024, device=device)
        prepared = [graphs.prepare(i, lambda x: (x * 2).sin() + 1, {"x": x}) for i in range(2)]
        assert graphs.nbytes >= 4 * x.nbytes, "two results, and two tensors between operators"
        both = graphs.nbytes
        del prepared[0]
        assert both - graphs.nbytes >= x.nbytes


def test_updates_of_host_parameters() -> None:
    inputs = {"x": torch.ones(2), "scale": 2.0, "depth": 3}
    assert not rebinds(inputs, {"scale": 2.0, "depth": 3})
    assert rebinds(inputs, {"depth": 4})
    assert rebinds(inputs, {"depth": 3.0}), "a step may go by a number's type"
    for update, message in (
        ({"x": 1}, "'x' is a fixed buffer: write into it; host parameters are: scale, depth"),
        ({"y": 1}, "'y' is no input"),
        ({"scale": "much"}, "host parameter 'scale' must be a number, got 'much'"),
    ):
        with pytest.raises(PlatformError, match=message):
            rebinds(inputs, update)
