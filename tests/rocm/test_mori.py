"""MORI's all-to-all through a stand-in, on tensors of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint_plugin_api import All2AllWorkload, DeviceInfo, SelectionError
from hardpoint_rocm import mori_all2all
from hardpoint_rocm.mori_all2all import MoriAll2All
from hardpoint_rocm.platform import RocmPlatform, describe_arch
from tests.parallel.ranks import ranks_in_threads
from tests.support import mori_stand_in
from tests.support.checkpoints import write_checkpoint
from tests.support.installed_stand_in import installed
from tests.support.mori_stand_in import CALLS
from tests.support.on_host_settings import without_triton
from tests.support.two_gpus import two_gpus

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], [6, 7, 8], [9, 3, 200, 17, 4, 4, 8, 1, 90]]
WORKLOAD = All2AllWorkload(dtype="bfloat16", parallel="ep", ranks=2, num_experts=4, top_k=2, hidden_size=64)


@pytest.fixture
def mori(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLS.clear()
    modules = {"mori": "", "mori.ops": "mori_stand_in", "mori.shmem": "mori_stand_in"}
    with installed(tmp_path / "site", monkeypatch, "amd_mori", "1.0", modules):
        yield


@pytest.fixture
def mi300xs(monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    return two_gpus(monkeypatch, RocmPlatform, describe_arch("AMD Instinct MI300X", "gfx942"))


def test_an_engine(mori: None, mi300xs: DeviceInfo, tmp_path: Path) -> None:
    """Two ranks with whole experts: tokens are those of core's exchange, and one object serves all layers."""
    write_checkpoint(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

    def run(all2all: str) -> tuple[list[Any], set[str]]:
        settings = without_triton("rocm", dtype="bfloat16", all2all_backend=all2all)
        with ranks_in_threads(tmp_path, 2, enable_expert_parallel=True, **settings) as llm:
            chosen = {row.chosen for row in llm.table.rows if row.family == "all2all"}
            return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)], chosen

    wanted, _ = run("all_to_all")
    assert not CALLS
    found, chosen = run("mori")
    assert chosen == {"mori"}
    assert found == wanted
    assert CALLS["EpDispatchCombineOp"] == CALLS["shmem_init_attr"] == CALLS["shmem_finalize"] == 2
    assert CALLS["dispatch"] == CALLS["combine"] > 0


def test_everything_that_is_missing_is_named(mi300xs: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(mi300xs, arch="gfx90a", features=mi300xs.features - {"p2p"})
    monkeypatch.setattr(RocmPlatform, "detect", classmethod(lambda cls: info))
    ctx = draw(EngineConfig.create(model="demo", **without_triton("rocm", all2all_backend="mori"))).ctx
    with pytest.raises(SelectionError) as caught:
        ctx.select(replace(WORKLOAD, parallel="tp+ep", dtype="float16"))
    for missing in ("package amd_mori is not installed", "gfx90a", "p2p", "float16", "tp+ep"):
        assert missing in str(caught.value)


def test_another_mori_is_refused(mori: None, mi300xs: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MoriAll2All.supports(WORKLOAD, mi300xs) == []
    assert [reason.code for reason in MoriAll2All.supports(replace(WORKLOAD, ranks=16), mi300xs)] == ["ranks"]
    monkeypatch.setattr(mori_stand_in.EpDispatchCombineOp, "combine", lambda self, input, weights: None)
    (found,) = mori_all2all.MORI.reasons()
    assert (found.code, found.supported) == ("mori-signature", "input, weights")


def test_the_stand_in_refuses_what_the_real_one_does() -> None:
    """So that a test above could have failed."""
    assert mori_stand_in.shmem_init_attr(0, 0, 1, bytes(128)) != 0
    group = mori_stand_in._Group(1)
    config = mori_stand_in.EpDispatchCombineConfig(torch.bfloat16, 0, 1, 8, 0, 0, 2, 4, 2, 1)
    made = mori_stand_in.EpDispatchCombineOp.__new__(mori_stand_in.EpDispatchCombineOp)
    made._config, made._group = config, group
    x, ids, weights = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    for wrong in (
        (x.half(), weights, None, ids),
        (x[:, :4], weights, None, ids),
        (x, weights.double(), None, ids),
        (x, weights, None, ids.long()),
        (x, weights, weights, ids),
        (x.t().contiguous().t(), weights, None, ids),
    ):
        with pytest.raises(RuntimeError):
            made.dispatch(*wrong)
    came, _, _, _, total = made.dispatch(x, weights, None, ids)
    assert (total.tolist(), came[3].isnan().all().item()) == ([3], True)
    with pytest.raises(ValueError, match="not the dispatched ones"):
        made.combine(came, None, ids[:2])
    assert made.combine(came, None, ids)[0][:3].tolist() == x.tolist()
