"""RCCL's communicator by torch.distributed's gloo, and AITER's quick all-reduce through a stand-in, on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.parallel.groups import alone
from hardpoint.parallel.process_group import Store
from hardpoint_plugin_api import CommunicatorWorkload, ConfigError, DeviceInfo, SelectionError
from hardpoint_rocm.aiter_allreduce import QuickAllReduce
from hardpoint_rocm.platform import RocmPlatform, describe_arch
from tests.parallel.ranks import on_each, ranks_in_threads
from tests.support import aiter_allreduce_stand_in as stand_in
from tests.support.aiter_calls import CALLS
from tests.support.checkpoints import write_checkpoint
from tests.support.on_host_settings import without_triton
from tests.support.two_gpus import two_gpus

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], [6, 7, 8], [9, 3, 200, 17, 4, 4, 8, 1, 90]]
WORKLOAD = CommunicatorWorkload(dtype="bfloat16", parallel="tp", ranks=2)
QUICK: dict[str, Any] = {"quick_reduce": "fp", "quick_reduce_min_bytes": "16", "quick_reduce_max_mib": 1}


@pytest.fixture
def mi300xs(monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    return two_gpus(monkeypatch, RocmPlatform, describe_arch("AMD Instinct MI300X", "gfx942"))


def test_an_engine(aiter: None, mi300xs: DeviceInfo, tmp_path: Path) -> None:
    """RCCL comes first; AITER's serves where it is named, with the same tokens."""
    write_checkpoint(tmp_path, "qwen3")

    def run(**more: Any) -> tuple[list[Any], set[str]]:
        settings = without_triton("rocm", dtype="bfloat16", plugin_config={"rocm": {"quick_reduce_min_bytes": "16"}})
        settings["deny"] += ("op.rms_norm=aiter", "op.add_rms_norm=aiter", "attention.causal=aiter_paged")
        settings["deny"] += ("attention.causal=aiter_flash",)
        with ranks_in_threads(tmp_path, 2, **(settings | more)) as llm:
            chosen = {row.chosen for row in llm.table.rows if row.family == "communicator"}
            return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)], chosen

    wanted, chosen = run()
    assert chosen == {"rccl"}
    assert "qr_all_reduce" not in CALLS
    found, chosen = run(communicator="aiter_quick_allreduce")
    assert chosen == {"aiter_quick_allreduce"}
    assert found == wanted
    assert CALLS["init_custom_qr"] == CALLS["qr_destroy"] == 2
    assert CALLS["qr_all_reduce"] > 8 * 2 * 2, "two sums of each layer and rank in every step"


def made(rank: int, store: Store, world: int, dtype: str, **more: Any) -> QuickAllReduce:
    """One rank's communicator, which has joined."""
    ctx: Any = SimpleNamespace(parallel=alone(), plugin_config=lambda name: QUICK | more)
    one = QuickAllReduce(ctx, replace(WORKLOAD, dtype=dtype, ranks=world))
    one.init(store, rank, world, "tp")
    return one


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("level", "bits"), [("fp", 0), ("fp8", 3), ("int6", 5), ("int4", 3)])
def test_sums(aiter: None, level: str, bits: int, dtype: str) -> None:
    """Whole vectors go through AITER, in numbers of so many bits; all else through RCCL."""
    generator, world, kind = torch.Generator().manual_seed(0), 4, getattr(torch, dtype)
    drawn = torch.randn(world, 8, 64, generator=generator).to(kind)

    def run(rank: int, store: Store) -> list[torch.Tensor]:
        one = made(rank, store, world, dtype, quick_reduce=level)
        shapes = (slice(None), slice(0, 0))
        large = torch.full((2**19 + 8,), rank, dtype=kind)
        sums = [one.all_reduce(drawn[rank][part].clone()) for part in shapes]
        sums += [
            one.all_reduce(drawn[rank][:1, :3].clone()),
            one.all_reduce(drawn[rank].float()),
            one.all_reduce(large),
        ]
        assert torch.equal(one.all_gather(drawn[rank]), drawn.flatten(0, 1))
        one.close()
        with pytest.raises(RuntimeError, match="left its group"):
            one.all_reduce(drawn[rank].clone())
        return sums

    true = drawn.double().sum(0)
    results = on_each(world, run)
    assert CALLS["qr_all_reduce"] == world, "the first alone"
    for whole, empty, odd, wide, large in results:
        assert torch.equal(whole, results[0][0])
        largest = drawn.abs().double().amax()
        room = world * largest * torch.finfo(kind).eps + ((world + 2 * world) * largest / 2**bits if bits else 0)
        assert (whole.double() - true).abs().max() <= room
        assert empty.shape == (0, 64)
        assert torch.allclose(odd.double(), true[:1, :3], atol=float(world * largest * torch.finfo(kind).eps))
        assert torch.allclose(wide.double(), true, atol=1e-5)
        assert (large == 6).all()


def test_a_sum_is_quantized(aiter: None) -> None:
    """In four bits a value far below its group's largest is lost."""
    x = torch.zeros(32, dtype=torch.float16)
    x[0], x[1] = 8, 0.25

    def run(rank: int, store: Store) -> torch.Tensor:
        one = made(rank, store, 2, "float16", quick_reduce="int4")
        total = one.all_reduce(x.clone())
        one.close()
        return total

    for total in on_each(2, run):
        assert total[1] == 0


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"quick_reduce": "int8"}, 2, r"quick_reduce int8: .* fp, fp8, int6, int4, int3"),
        ({"quick_reduce": "int3"}, 4, r"int3: serves 2 ranks, not 4; take int4"),
        ({"quick_reduce_min_bytes": "1k"}, 2, r"quick_reduce_min_bytes 1k: must be auto or a number"),
        ({"quick_reduce_max_mib": 0}, 2, r"quick_reduce_max_mib 0: must be above 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], ranks: int, message: str) -> None:
    ctx: Any = SimpleNamespace(plugin_config=lambda name: QUICK | settings)
    with pytest.raises(ConfigError, match=message):
        QuickAllReduce(ctx, replace(WORKLOAD, ranks=ranks))


def test_the_smallest_sum(aiter: None) -> None:
    """AITER's own, by dtype, ranks and numbers."""
    ctx: Any = SimpleNamespace(plugin_config=lambda name: QUICK | {"quick_reduce_min_bytes": "auto"})
    assert QuickAllReduce(ctx, WORKLOAD).smallest == 2 * 2**20
    assert QuickAllReduce(ctx, replace(WORKLOAD, dtype="float16", ranks=8)).smallest == 16 * 2**20


def test_everything_that_is_missing_is_named(mi300xs: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(mi300xs, arch="gfx90a", features=mi300xs.features - {"p2p"})
    monkeypatch.setattr(RocmPlatform, "detect", classmethod(lambda cls: info))
    config = EngineConfig.create(model="demo", **without_triton("rocm", communicator="aiter_quick_allreduce"))
    with pytest.raises(SelectionError) as caught:
        draw(config).ctx.select(replace(WORKLOAD, dtype="float32", ranks=3))
    for missing in ("amd-aiter", "gfx90a", "p2p", "float32"):
        assert missing in str(caught.value)


def test_other_ranks_are_refused(aiter: None, mi300xs: DeviceInfo) -> None:
    assert QuickAllReduce.supports(WORKLOAD, mi300xs) == []
    (found,) = QuickAllReduce.supports(replace(WORKLOAD, ranks=6), mi300xs)
    assert (found.code, found.supported) == ("ranks", "2, 4, 8")


def test_the_stand_in_refuses_what_the_real_one_does() -> None:
    """So that a test above could have failed."""
    with pytest.raises(ValueError, match="Odd num"):
        stand_in.init_custom_qr(0, 3)
    own = stand_in.init_custom_qr(0, 4, 64)
    x = torch.ones(8, dtype=torch.float16)
    wrong: list[tuple[torch.Tensor, torch.Tensor, int]] = [
        (x, x, 5),
        (x, x.bfloat16(), 0),
        (x, x[:4], 0),
        (x[:0], x[:0], 0),
        (x.repeat(8), x.repeat(8), 0),
        (x[:4], x[:4], 0),
        (x.float(), x.float(), 0),
        (x, x, 4),
    ]
    for inp, out, level in wrong:
        with pytest.raises((ValueError, RuntimeError)):
            stand_in.qr_all_reduce(own, inp, out, level)
    with pytest.raises(AssertionError, match="no handles"):
        stand_in.qr_all_reduce(own, x, x, 0)
    with pytest.raises(AssertionError, match="address alone"):
        stand_in.qr_all_reduce(own, x.repeat(2)[::2], x, 0)
    stand_in.qr_destroy(own)
