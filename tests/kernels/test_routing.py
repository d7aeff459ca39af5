"""Choice of experts, permutes and what comes after them, in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import routing
from hardpoint.ops.moe_permute import sort_pairs
from hardpoint_plugin_api import ConfigError, UnknownNameError
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants

ROUTERS = ("route_topk", "topk_softmax", "topk_sigmoid", "grouped_topk")
SLOW = dict.fromkeys((*ROUTERS, "moe_permute", "moe_unpermute"), ("many",))


@pytest.mark.parametrize(("name", "dtype", "device"), variants(*ROUTERS, "moe_permute", "moe_unpermute"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(routing, name), dtype, device, without=SLOW)
    assert not failed, "\n".join(failed)


def test_whatever_the_logits_are_a_row_gets_different_experts() -> None:
    """Experts of a row that is no number are read as indices all the same."""
    logits = torch.randn(4, 24)
    logits[0, 3], logits[1], logits[2, 5:] = float("nan"), float("nan"), -float("inf")
    for bias in (None, torch.randn(24)):
        ids, _ = routing.topk_softmax(logits, bias, top_k=8, renormalize=True, scaling=1.0)
        assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 24 for row in ids.tolist())


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0]])
    ids, _ = routing.topk_softmax(logits, top_k=3, renormalize=True, scaling=1.0)
    assert ids.tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("top_k", [1, 3])
def test_pairs_are_sorted_over_several_blocks(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_MANY_PAIRS", 256)
    ids = torch.randint(-1, 5, (400, top_k), dtype=torch.int32)
    order, starts, places = routing.sort_pairs(ids, 5)
    wanted = sort_pairs(ids, 5)
    present = int(wanted[1][-1])
    assert torch.equal(order[:present].long(), wanted[0][:present])
    assert sorted(order.tolist()) == list(range(ids.numel()))
    assert torch.equal(starts, wanted[1])
    assert torch.equal(places, wanted[2])


def test_says_what_does_not_fit() -> None:
    logits = torch.randn(2, 12)
    settings = {"renormalize": False, "scaling": 1.0}
    with pytest.raises(UnknownNameError, match="unknown scoring 'softmx'; did you mean 'softmax'"):
        routing.grouped_topk(logits, top_k=2, num_groups=2, top_groups=1, scoring="softmx", **settings)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="cannot choose 13 experts from the best 1 of 1 groups of 12 experts; the number"
    ):
        routing.topk_softmax(logits, top_k=13, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="correction bias must be float32 of shape"):
        routing.topk_sigmoid(logits, torch.zeros(12, dtype=torch.bfloat16), top_k=2, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiles_without_spills(targets: tuple[str, ...]) -> None:
    router = {"E": 128, "TOP_K": 8, "G": 1, "TOP_GROUPS": 1, "GROUPED": False, "SIGMOID": False, "RENORMALIZE": True}
    router |= {"BLOCK_G": 1, "BLOCK_S": 128, "BLOCK_K": 8}
    grouped = {"E": 256, "G": 8, "TOP_GROUPS": 4, "GROUPED": True, "SIGMOID": True, "BLOCK_G": 8, "BLOCK_S": 32}
    pointers = {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "ids_ptr": "*i32", "weights_ptr": "*fp32"}
    scalars = {"logits_stride": "i32:16", "scaling": "fp32"}
    sorting = {"ids_ptr": "*i32", "order_ptr": "*i32", "starts_ptr": "*i64", "places_ptr": "*i64", "num_pairs": "i32"}
    sorting |= {"ids_stride": "i32", "num_experts": "i32:16"}
    moving = {"H": "i32:16", "x_stride": "i32:16", "rows_stride": "i32:16", "num_experts": "i32:16"}
    rows = {"x_ptr": "*bf16", "rows_ptr": "*bf16", "out_ptr": "*bf16", "weights_ptr": "*fp32"}
    jobs = []
    for target in targets:
        route = "hardpoint.kernels.routing:route_kernel"
        jobs += [Job(route, {**pointers, **scalars}, {**router, **more}, target, 1, 1) for more in ({}, grouped)]
        constants = {"map_ptr": None, "ids_step": 1, "K": 8, "BLOCK": 4096}
        jobs.append(Job("hardpoint.kernels.routing:sort_pairs_kernel", sorting, constants, target, 16, 1))
        for name in ("permute_rows_kernel", "unpermute_rows_kernel"):
            signature = {**sorting, **moving, **rows}
            jobs.append(Job(f"hardpoint.kernels.routing:{name}", signature, {"K": 8, "BLOCK": 1024}, target, 4, 1))
    for compiled in compile_kernels(jobs):
        assert compiled.spilled == 0, compiled.job
        assert compiled.registers <= 128, compiled.job
