"""The communicator over peer memory between GPUs of one host, each rank a process: eager, captured, and broken off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from hardpoint.bench.rank_group import BenchRank, RankSettings, on_ranks
from hardpoint_cuda.peer_communicator import SLOT_BYTES, SUM_BYTES, PeerCommunicator

pytestmark = pytest.mark.accelerator
RANKS = pytest.mark.parametrize("ranks", [2, 4, 8])
SHAPES = ((1, 64128), (32, 64128), (3, 8), (1, 4096), (129, 4096), (64, 24), (700, 2064))
"""Of each rank: logits of half a vocabulary, hidden states, and sizes beyond a slot or a sum of the kernels."""


def joined(at: BenchRank) -> PeerCommunicator:
    """This rank's communicator, which has met the others'."""
    group = at.group("tp")
    at.open(group, "tried")
    ((_, made),) = group._served
    assert isinstance(made, PeerCommunicator)
    return made


def drawn(shape: tuple[int, ...], ranks: int, seed: int) -> list[torch.Tensor]:
    """Each rank's tensor, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(ranks)]


def collectives(made: PeerCommunicator, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return made.all_gather_columns(own), made.all_gather(own), made.all_reduce(own.clone())


def check(found: tuple[torch.Tensor, ...], parts: list[torch.Tensor]) -> None:
    columns, rows, total = (x.cpu() for x in found)
    assert torch.equal(columns, torch.cat(parts, 1))
    assert torch.equal(rows, torch.cat(parts))
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted += part.float()
    if len(parts) * total.nbytes <= SUM_BYTES:
        assert torch.equal(total, wanted.bfloat16())
    else:  # NCCL's, which rounds what ranks hand on to each other
        torch.testing.assert_close(total.float(), wanted, rtol=2**-7, atol=len(parts) * 2**-5)


def exchange(at: BenchRank) -> int:
    """Calls of unlike sizes, many in a row without a wait between them; then captured ones, replayed."""
    made, compared, ranks = joined(at), 0, at.settings.ranks
    device = at.ctx.torch_device
    calls = [drawn(shape, ranks, seed) for seed in range(3) for shape in SHAPES]
    given = [parts[at.rank].to(device) for parts in calls]
    results = [collectives(made, own) for own in given]
    for found, parts in zip(results, calls, strict=True):
        check(found, parts)
        compared += 1
    for shape in SHAPES:
        if 2 * ranks * shape[0] * shape[1] > SLOT_BYTES:
            continue  # NCCL captures in a way of its own
        own = drawn(shape, ranks, 0)[at.rank].to(device)
        collectives(made, own)
        at.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = collectives(made, own)
        for seed in range(10):
            parts = drawn(shape, ranks, seed)
            own.copy_(parts[at.rank])
            graph.replay()
            check(found, parts)
            compared += 1
        at.meet()
        del graph
    return compared


def break_off(at: BenchRank) -> float:
    """Rank 0 gathers alone and leaves: seconds until its device is idle."""
    made = joined(at)
    if at.rank:
        time.sleep(3.0)
        return 0.0
    x = torch.ones(8, 4096, dtype=torch.bfloat16, device=at.ctx.torch_device)
    torch.cuda.synchronize()
    threading.Timer(1.0, made.abort).start()
    began = time.monotonic()
    made.all_gather_columns(x)
    torch.cuda.synchronize()
    taken = time.monotonic() - began
    with pytest.raises(RuntimeError, match="left its group"):
        made.all_gather_columns(x)
    return taken


def on_devices(ranks: int, act: Callable[[BenchRank], float]) -> float:
    """Rank 0's result."""
    if torch.version.cuda is None or torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} of NVIDIA's devices")
    return on_ranks(RankSettings(ranks, "bfloat16", "cuda", communicator="cuda_peer"), act)


@RANKS
def test_columns_rows_and_sums(ranks: int) -> None:
    assert on_devices(ranks, exchange) >= 3 * len(SHAPES) + 40


def test_a_rank_that_leaves_frees_its_device() -> None:
    assert 0.9 < on_devices(2, break_off) < 2.9
