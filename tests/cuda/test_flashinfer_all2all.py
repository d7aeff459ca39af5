"""FlashInfer's all-to-all through a stand-in, on tensors of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from hardpoint import SamplingParams
from hardpoint.parallel.store_comm import StoreComm
from hardpoint_cuda import flashinfer_all2all
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import DeviceInfo
from tests.parallel.ranks import ranks_in_threads
from tests.support import flashinfer_all2all_stand_in as stand_in
from tests.support.checkpoints import write_checkpoint
from tests.support.flashinfer_all2all_stand_in import CALLS
from tests.support.installed_stand_in import installed
from tests.support.on_host_settings import WITHOUT_PEERS, without_triton
from tests.support.two_gpus import two_gpus

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], [6, 7, 8], [9, 3, 200, 17, 4, 4, 8, 1, 90]]
MODULES = {
    "flashinfer": "",
    "flashinfer.comm": "",
    "flashinfer.comm.trtllm_moe_alltoall": "flashinfer_all2all_stand_in",
    "flashinfer.comm.mapping": "flashinfer_all2all_stand_in",
    "flashinfer.comm.mnnvl": "flashinfer_all2all_stand_in",
}


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLS.clear()
    with installed(tmp_path / "site", monkeypatch, "flashinfer-python", "0.6.18", MODULES):
        yield


@pytest.fixture
def h100s(monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    return two_gpus(monkeypatch, CudaPlatform, describe_arch("NVIDIA H100 80GB HBM3", (9, 0)))


def test_an_engine(flashinfer: None, h100s: DeviceInfo, tmp_path: Path) -> None:
    """Two ranks with whole experts: tokens are those of core's exchange, and one object serves all layers."""
    write_checkpoint(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

    def run(all2all: str) -> tuple[list[Any], set[str]]:
        settings = without_triton("cuda", dtype="bfloat16", all2all_backend=all2all)
        settings["deny"] += ("attention.causal=flashinfer", *WITHOUT_PEERS)
        with ranks_in_threads(tmp_path, 2, enable_expert_parallel=True, **settings) as llm:
            chosen = {row.chosen for row in llm.table.rows if row.family == "all2all"}
            return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)], chosen

    wanted, _ = run("all_to_all")
    assert not CALLS
    found, chosen = run("flashinfer")
    assert chosen == {"flashinfer"}
    assert found == wanted
    assert CALLS["MoeAlltoAll"] == 2, "one for each rank, whatever the number of layers"
    assert CALLS["dispatch"] == CALLS["combine"] > 0


def test_another_flashinfer_is_refused(flashinfer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flashinfer_all2all.FLASHINFER.reasons() == []
    monkeypatch.setattr(stand_in.MoeAlltoAll, "combine", lambda self, payloads: None)
    (found,) = flashinfer_all2all.FLASHINFER.reasons()
    assert (found.code, found.supported) == ("flashinfer-signature", "payloads")
    monkeypatch.delattr(stand_in.MoeAlltoAll, "dispatch")
    found, other = flashinfer_all2all.FLASHINFER.reasons()
    assert (found.code, other.code) == ("flashinfer-function", "flashinfer-signature")


def test_the_stand_in_refuses_what_the_real_one_does() -> None:
    """So that a test above could have failed."""
    config = stand_in.MnnvlConfig(StoreComm(HashStore(), 0, 1, 5.0))
    mapping = stand_in.Mapping(moe_tp_size=1, moe_ep_size=1)
    made = stand_in.MoeAlltoAll(mapping, 4, 1, 2, 1024, mnnvl_config=config)
    x, ids = torch.ones(3, 8, dtype=torch.bfloat16), torch.tensor([[0], [1], [1]], dtype=torch.int32)
    for wrong in ((ids.long(), [x]), (ids, [x[:2]]), (ids, [x.t().contiguous().t()]), (ids, [torch.ones(3, 999)])):
        with pytest.raises(RuntimeError):
            made.dispatch(*wrong, 4)
    with pytest.raises(AssertionError, match="exceeds"):
        made.dispatch(ids, [x], 5)
    with pytest.raises(AssertionError, match="before successful dispatch"):
        made.combine(x[None], 4)
    (came,) = made.dispatch(ids, [x], 4)
    assert came[0, 3].isnan().all()
    assert made.combine(came, 4).tolist() == x.tolist()
    with pytest.raises(ValueError, match="do not multiply"):
        stand_in.Mapping(world_size=2)
