"""HIP graphs through core's contract of graph engines, with a stand-in for torch's graphs on tensors of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import ConfigError, EagerGraphEngine, GraphEngine
from hardpoint_rocm.graphs import HipGraphs
from hardpoint_rocm.platform import RocmPlatform, describe_arch
from tests.support.engines import SMALL
from tests.support.graph_contract import RecordingContract
from tests.support.host_graphs import HostGraph, HostModuleWithGraphs
from tests.support.on_host_settings import without_triton

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def graphs_on_host(mi300x: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300X whose tensors, streams and graphs are on the host."""
    monkeypatch.setattr(RocmPlatform, "device_module", lambda self: HostModuleWithGraphs())
    monkeypatch.setattr(HipGraphs, "kind", HostGraph)
    monkeypatch.setattr(HipGraphs, "give_up", lambda self, pool: None)
    monkeypatch.setattr(HostGraph, "captured", 0)
    monkeypatch.setattr("hardpoint.platforms.stream_graphs._at_place_of", lambda x: x)  # memory of devices alone


class TestHipGraphs(RecordingContract):
    """As on a device; the stand-in takes some waits for calls like any other."""

    sees_waits = False

    @pytest.fixture
    def graphs(self, graphs_on_host: None) -> GraphEngine:
        info = RocmPlatform.detect()
        platform = RocmPlatform(info, {"graphs": True})  # type: ignore[arg-type]  # it was detected
        platform.activate(0)
        return platform.graph_engine()

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")


def test_an_engine(graphs_on_host: None) -> None:
    """Decodes are replayed, with the tokens of eager ones."""

    def run(**config: Any) -> tuple[list[int], float]:
        settings = without_triton("rocm", dtype="float32", custom_ops=["none"], attention_backend="reference")
        settings |= {"enforce_eager": False, "plugin_config": {"rocm": config}}
        with LLM("demo", **(SMALL | settings)) as llm:
            (output,) = llm.generate(["The whale"], GREEDY)
            return list(output.outputs[0].token_ids), llm.metrics.value("hardpoint_graph_replays_total")

    expected, replays = run()
    assert (replays, HostGraph.captured) == (0, 0)
    tokens, replays = run(graphs=True, graph_batch_sizes="1,2", graph_token_sizes="none")
    assert tokens == expected
    assert replays > 5
    assert HostGraph.captured > 0


def test_graphs_are_asked_for() -> None:
    info = describe_arch("AMD Instinct MI300X", "gfx942")
    assert type(RocmPlatform(info).graph_engine()) is EagerGraphEngine
    wrong = RocmPlatform(info, {"graphs": True, "graph_batch_sizes": "some"})
    wrong._capture_stream = None  # type: ignore[assignment]  # sizes are read first
    with pytest.raises(ConfigError, match=r"rocm.graph_batch_sizes must be auto or positive numbers"):
        wrong.graph_engine()
