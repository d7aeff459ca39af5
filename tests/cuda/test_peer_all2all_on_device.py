"""The all-to-all over peer memory between two GPUs, each rank a process: eager, captured, and broken off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from hardpoint.bench.rank_group import BenchRank, RankSettings, on_ranks
from hardpoint_cuda.peer_all2all import PeerAll2All
from hardpoint_plugin_api import All2AllWorkload

pytestmark = pytest.mark.accelerator
EXPERTS, TOP_K, HIDDEN = 16, 4, 2048
TOKENS = (1, 3, 64, 700)
SETTINGS = RankSettings(2, "bfloat16", "cuda", all2all="cuda_peer_memory", tokens=1024)


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if torch.version.cuda is None or torch.accelerator.device_count() < 2:
        pytest.skip("needs two of NVIDIA's devices")


def joined(at: BenchRank) -> PeerAll2All:
    """This rank's all-to-all, which has met the other's."""
    group = at.group("ep")
    ctx = at.context(group)
    workload = All2AllWorkload(
        dtype="bfloat16", parallel="ep", ranks=2, num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN
    )
    offer = ctx.select(workload).offer
    made = PeerAll2All(ctx, workload)
    ctx.adopt(offer, made, group)
    at.open(group, "tried")
    return made


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
    """Expert number e, counted from ``first``, makes (e + 1) / 8 times of a token."""
    factors = torch.where(ids >= 0, (ids + first + 1) / 8 * weights, 0.0).sum(-1, keepdim=True)
    return torch.where((ids >= 0).any(-1, keepdim=True), x.float() * factors, float("nan")).to(x.dtype)


def draw(count: int, rank: int, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tokens, ids and weights of one rank; a fifth of the ids are absent."""
    generator = torch.Generator().manual_seed(1000 * seed + 2 * count + rank)
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].int()
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)
    drawn = torch.randn(count, HIDDEN, generator=generator).bfloat16(), ids, torch.rand(ids.shape, generator=generator)
    return tuple(one.to(device) for one in drawn)


def step(made: PeerAll2All, given: tuple[torch.Tensor, ...], rows: list[int], rank: int) -> torch.Tensor:
    x, ids, weights = given
    made.expect(rows)
    sent = made.dispatch(x, None, ids, weights)
    assert sent.ids is not None
    assert sent.weights is not None
    y = experts(sent.x, sent.ids, sent.weights, rank * EXPERTS // 2)
    out = torch.full_like(x, float("nan"))
    made.combine(y, sent.handle, out)
    return out


def check(out: torch.Tensor, given: tuple[torch.Tensor, ...]) -> None:
    true = experts(given[0].float(), given[1], given[2], 0).nan_to_num()
    torch.testing.assert_close(out.float(), true, rtol=2.0**-6, atol=2.0**-6)


def exchange(at: BenchRank) -> int:
    """Steps of unlike numbers of tokens, many in a row without a wait between them; then captured ones, replayed."""
    made, compared = joined(at), 0
    for seed in range(3):
        for count in TOKENS:
            rows = [count, max(0, count - 3)] if seed % 2 else [count, count]
            all_given = [draw(rows[at.rank], at.rank, 100 * seed + n, at.ctx.torch_device) for n in range(10)]
            results = [step(made, given, rows, at.rank) for given in all_given]
            for out, given in zip(results, all_given, strict=True):
                check(out, given)
                compared += 1
    for count in TOKENS:
        given = draw(count, at.rank, 0, at.ctx.torch_device)
        at.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(made, given, [count, count], at.rank)
        for seed in range(20):
            for place, new in zip(given, draw(count, at.rank, seed, at.ctx.torch_device), strict=True):
                place.copy_(new)
            graph.replay()
            check(out, given)
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
    given = draw(8, 0, 0, at.ctx.torch_device)
    timer = threading.Timer(1.0, made.abort)
    timer.start()
    began = time.monotonic()
    made.expect([8, 8])
    made.dispatch(given[0], None, given[1], given[2])
    torch.cuda.synchronize()
    return time.monotonic() - began


def on_two(act: Callable[[BenchRank], float]) -> float:
    """Rank 0's result."""
    return on_ranks(SETTINGS, act)


def test_tokens_come_back() -> None:
    assert on_two(exchange) == 3 * len(TOKENS) * 10 + 20 * len(TOKENS)


def test_a_rank_that_leaves_frees_its_device() -> None:
    assert 0.9 < on_two(break_off) < 2.9
