"""DeepEP's all-to-alls through a stand-in, on tensors of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.parallel.store_comm import StoreComm
from hardpoint_cuda import deepep
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import All2AllWorkload, DeviceInfo, SelectionError
from tests.parallel.ranks import ranks_in_threads
from tests.support import deepep_stand_in
from tests.support.checkpoints import write_checkpoint
from tests.support.deepep_stand_in import CALLS
from tests.support.installed_stand_in import installed
from tests.support.on_host_settings import WITHOUT_PEERS, without_triton
from tests.support.two_gpus import two_gpus

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], [6, 7, 8], [9, 3, 200, 17, 4, 4, 8, 1, 90]]
WORKLOAD = All2AllWorkload(dtype="bfloat16", parallel="ep", ranks=2, num_experts=4, top_k=2, hidden_size=2048)


@pytest.fixture
def deep_ep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLS.clear()
    with installed(tmp_path / "site", monkeypatch, "deep_ep", "1.2.1", {"deep_ep": "deepep_stand_in"}):
        yield


@pytest.fixture
def h100s(monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    return two_gpus(monkeypatch, CudaPlatform, describe_arch("NVIDIA H100 80GB HBM3", (9, 0)))


@pytest.mark.parametrize(
    ("name", "changes", "calls"),
    [
        ("deepep_high_throughput", {}, {"dispatch", "combine"}),
        (
            "deepep_low_latency",
            {"hidden_size": 2048, "num_hidden_layers": 1},
            {"low_latency_dispatch", "low_latency_combine"},
        ),
    ],
)
def test_an_engine(
    deep_ep: None, h100s: DeviceInfo, name: str, changes: dict[str, Any], calls: set[str], tmp_path: Path
) -> None:
    """Two ranks with whole experts: tokens are those of core's exchange, and one buffer serves all layers."""
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **changes}
    write_checkpoint(tmp_path, "qwen3_moe", **mixture)

    def run(all2all: str) -> tuple[list[Any], set[str]]:
        settings = without_triton("cuda", dtype="bfloat16", max_num_batched_tokens=32, all2all_backend=all2all)
        settings["deny"] += WITHOUT_PEERS
        with ranks_in_threads(tmp_path, 2, enable_expert_parallel=True, **settings) as llm:
            chosen = {row.chosen for row in llm.table.rows if row.family == "all2all"}
            return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)], chosen

    wanted, _ = run("all_to_all")
    assert not CALLS
    found, chosen = run(name)
    assert chosen == {name}
    assert found == wanted
    assert calls <= CALLS.keys()
    assert CALLS["Buffer"] == 2, "one for each rank, whatever the number of layers"


def test_everything_that_is_missing_is_named(h100s: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(h100s, arch="sm_80", features=h100s.features - {"p2p"})
    monkeypatch.setattr(CudaPlatform, "detect", classmethod(lambda cls: info))
    settings = without_triton("cuda", all2all_backend="deepep_low_latency")
    ctx = draw(EngineConfig.create(model="demo", **settings)).ctx
    with pytest.raises(SelectionError) as caught:
        ctx.select(replace(WORKLOAD, parallel="tp+ep", dtype="float16"))
    for missing in ("package deep_ep is not installed", "sm_80", "p2p", "float16", "tp+ep"):
        assert missing in str(caught.value)


def test_another_deep_ep_is_refused(deep_ep: None, h100s: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (deepep.HighThroughput, deepep.LowLatency)
    assert [kind.supports(WORKLOAD, h100s) for kind in kinds] == [[], []]
    odd = replace(WORKLOAD, ranks=3, hidden_size=1000, top_k=12)
    for kind, wanted in zip(kinds, (["hidden-size", "ranks"], ["top-k", "hidden-size", "ranks"]), strict=True):
        assert [reason.code for reason in kind.supports(odd, h100s)] == wanted
    pcie = replace(h100s, name="NVIDIA H100 PCIe")
    assert [reason.code for reason in deepep.LowLatency.supports(WORKLOAD, pcie)] == ["nvlink"]
    monkeypatch.setattr(deepep_stand_in.Buffer, "combine", lambda self, x, handles: None)
    monkeypatch.delattr(deepep_stand_in.Buffer, "low_latency_combine")
    found = deepep.DEEPEP.reasons()
    assert [(reason.code, reason.supported) for reason in found] == [
        ("deepep-signature", "x, handles"),
        ("deepep-function", None),
    ]


def test_the_stand_in_refuses_what_the_real_one_does(deep_ep: None) -> None:
    """So that a test above could have failed."""
    comm = StoreComm(HashStore(), 0, 1, 5.0)
    made = deepep_stand_in.Buffer(None, num_nvl_bytes=1, comm=comm)
    x, ids, weights = torch.ones(3, 16, dtype=torch.bfloat16), torch.tensor([[0], [1], [-1]]), torch.ones(3, 1)
    with pytest.raises(RuntimeError):
        made.get_dispatch_layout(ids.int(), 2)
    of_rank, _, of_expert, in_rank, _ = made.get_dispatch_layout(ids, 2)
    assert (of_rank.tolist(), of_expert.tolist(), in_rank[:, 0].tolist()) == ([2], [1, 1], [True, True, False])
    good: dict[str, Any] = {
        "x": x,
        "num_tokens_per_rank": of_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": of_expert,
        "topk_idx": ids,
        "topk_weights": weights,
    }
    came, _, _, counts, handle, _ = made.dispatch(**good)
    assert (came.shape, counts) == ((2, 16), [1, 1])
    assert made.combine(came, handle)[0][:, 0].tolist() == [1, 1, 0]
    for change in (
        {"x": x.float()},
        {"x": x[:, :4].contiguous()},
        {"x": x.t().contiguous().t()},
        {"topk_idx": ids.int()},
        {"topk_weights": weights.double()},
        {"x": (x, weights)},
    ):
        with pytest.raises(RuntimeError):
            made.dispatch(**(good | change))
    with pytest.raises(TypeError):
        made.dispatch(**good, tokens=3)  # type: ignore[call-arg]  # that is what is tested
    with pytest.raises(RuntimeError):
        made.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
