"""The all-to-all over peer memory between GPUs of one host, each rank a process: eager, captured, and broken off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hardpoint.bench.rank_group import BenchRank, RankSettings, on_ranks
from hardpoint_cuda.peer_all2all import PeerAll2All
from hardpoint_plugin_api import All2AllWorkload
from tests.support.peer_steps import Step, by_own_experts, draw, wrong_elements

pytestmark = pytest.mark.accelerator
EXPERTS = 16
WORKLOAD = All2AllWorkload(dtype="bfloat16", parallel="ep", ranks=2, num_experts=EXPERTS, top_k=4, hidden_size=2048)
TOKENS = (1, 3, 64, 700)
RANKS = pytest.mark.parametrize("ranks", [2, 4, 8])


def joined(at: BenchRank) -> PeerAll2All:
    """This rank's all-to-all, which has met the others'."""
    group, workload = at.group("ep"), replace(WORKLOAD, ranks=at.settings.ranks)
    ctx = at.context(group)
    offer = ctx.select(workload).offer
    made = PeerAll2All(ctx, workload)
    ctx.adopt(offer, made, group)
    at.open(group, "tried")
    return made


def drawn(rows: list[int], seed: int) -> Step:
    """A step of all ranks, on the host."""
    return draw(WORKLOAD, rows, 1000 * seed + sum(rows), quantized=False, is_expected=True)


def given(step: Step, at: BenchRank) -> tuple[torch.Tensor, ...]:
    """This rank's tokens, ids and weights, on its device."""
    device = at.ctx.torch_device
    return step.x[at.rank].to(device), step.ids[at.rank].to(device), step.weights[at.rank].to(device)


def take_step(made: PeerAll2All, own: tuple[torch.Tensor, ...], rows: list[int], rank: int) -> torch.Tensor:
    x, ids, weights = own
    made.expect(rows)
    sent = made.dispatch(x, None, ids, weights)
    assert sent.ids is not None
    assert sent.weights is not None
    y = by_own_experts(sent.x, sent.ids, sent.weights, rank * EXPERTS // len(rows), x.dtype)
    out = torch.full_like(x, float("nan"))
    made.combine(y, sent.handle, out)
    return out


def check(out: torch.Tensor, step: Step, rank: int) -> None:
    wrong = wrong_elements(out.cpu(), step, rank, out.dtype)
    assert not len(wrong), f"rank {rank}: {wrong[0].tolist()} of {step.rows}"


def exchange(at: BenchRank) -> int:
    """Steps of unlike numbers of tokens, many in a row without a wait between them; then captured ones, replayed."""
    made, compared, ranks = joined(at), 0, at.settings.ranks
    for seed in range(3):
        for count in TOKENS:
            rows = [max(0, count - 3 * rank) for rank in range(ranks)] if seed % 2 else [count] * ranks
            steps = [drawn(rows, 100 * seed + n) for n in range(10)]
            all_given = [given(step, at) for step in steps]
            results = [take_step(made, own, rows, at.rank) for own in all_given]
            for out, step in zip(results, steps, strict=True):
                check(out, step, at.rank)
                compared += 1
    for count in TOKENS:
        own = given(drawn([count] * ranks, 0), at)
        at.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = take_step(made, own, [count] * ranks, at.rank)
        for seed in range(20):
            step = drawn([count] * ranks, seed)
            for place, new in zip(own, given(step, at), strict=True):
                place.copy_(new)
            graph.replay()
            check(out, step, at.rank)
            compared += 1
        at.meet()
        del graph
    return compared


def break_off(at: BenchRank) -> float:
    """Rank 0 dispatches alone and leaves: seconds until its device is idle."""
    made = joined(at)
    if at.rank:
        time.sleep(3.0)
        return 0.0
    x, ids, weights = given(drawn([8, 8], 0), at)
    timer = threading.Timer(1.0, made.abort)
    timer.start()
    began = time.monotonic()
    made.expect([8, 8])
    made.dispatch(x, None, ids, weights)
    torch.cuda.synchronize()
    return time.monotonic() - began


def on_devices(ranks: int, act: Callable[[BenchRank], float]) -> float:
    """Rank 0's result."""
    if torch.version.cuda is None or torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} of NVIDIA's devices")
    return on_ranks(RankSettings(ranks, "bfloat16", "cuda", all2all="cuda_peer_memory", tokens=1024), act)


@RANKS
def test_tokens_come_back(ranks: int) -> None:
    assert on_devices(ranks, exchange) == 3 * len(TOKENS) * 10 + 20 * len(TOKENS)


def test_a_rank_that_leaves_frees_its_device() -> None:
    assert 0.9 < on_devices(2, break_off) < 2.9
