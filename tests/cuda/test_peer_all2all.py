"""The all-to-all over peer memory: ranks in processes, each with the real kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint_cuda import peer_all2all
from hardpoint_cuda.peer_all2all import Layout, PeerAll2All
from hardpoint_cuda.platform import describe_arch
from hardpoint_plugin_api import All2AllWorkload, DispatchHandle
from tests.support.peer_ranks import Given, on_ranks, take_steps, wait_for_nobody
from tests.support.peer_steps import Step, draw, wrong_elements

WORKLOAD = All2AllWorkload(dtype="float32", parallel="ep", ranks=2, num_experts=6, top_k=3, hidden_size=24)


def check(given: Given, steps: Sequence[Step], folder: Path) -> None:
    """Each token has what all of its experts make of it, wherever they are."""
    dtype = getattr(torch, str(given.workload.dtype))
    found = on_ranks(given, folder, partial(take_steps, steps=steps))
    for number, step in enumerate(steps):
        for rank, results in enumerate(found):
            wrong = wrong_elements(torch.from_numpy(results[number]), step, rank, dtype)
            assert not len(wrong), f"step {number}, rank {rank}: {wrong[0].tolist()} of {step.rows}"


@pytest.mark.parametrize(
    ("ranks", "dtype", "hidden"),
    [
        (3, "bfloat16", 24),
        (2, "float16", 7),
        (2, "float32", 2100),
        pytest.param(2, "float32", 24, marks=pytest.mark.nightly),
        pytest.param(4, "float32", 2100, marks=pytest.mark.nightly),
        pytest.param(8, "bfloat16", 24, marks=pytest.mark.nightly),
    ],
)
def test_steps(ranks: int, dtype: str, hidden: int, tmp_path: Path) -> None:
    """Uneven, empty, more tokens than programs, and quantized ones; whether or not they are expected."""
    workload = replace(WORKLOAD, ranks=ranks, dtype=dtype, num_experts=3 * ranks, hidden_size=hidden)
    rows = [(6, 6, 6, 6), (2, 7, 0, 4), (0, 0, 0, 0), (1, 0, 0, 5), (7, 3, 2, 1)]
    steps = [
        draw(workload, (some * 2)[:ranks], number, quantized=number % 3 == 1, is_expected=number % 2 == 0)
        for number, some in enumerate(rows)
    ]
    check(Given(workload, max_tokens=7 * ranks), [*steps, steps[0]], tmp_path)


def test_meetings_are_numbered_beyond_the_largest_number(tmp_path: Path) -> None:
    """After two days of steps a flag's number becomes negative."""
    steps = [draw(WORKLOAD, (2, 3), seed, quantized=False, is_expected=True) for seed in range(4)]
    check(Given(WORKLOAD, max_tokens=8, first_meeting=2**31 - 3), steps, tmp_path)


def test_a_rank_that_leaves_waits_no_more(tmp_path: Path) -> None:
    taken, _ = on_ranks(Given(WORKLOAD, max_tokens=4), tmp_path, wait_for_nobody)
    assert 0.25 < taken < 20


def test_layout() -> None:
    """Parts do not overlap, and begin where vectors do."""
    layout = Layout.of(4, 5, 3, 48)
    starts = [layout.flags, layout.meetings, layout.left, layout.ids, layout.weights, layout.rows, layout.sums]
    needs = [4 * peer_all2all.PROGRAMS * 4, peer_all2all.PROGRAMS * 4, 4, 240, 240, 20 * 48 + 16, 20 * 48]
    assert all(start % 128 == 0 for start in starts)
    for start, need, end in zip(starts, needs, [*starts[1:], layout.size], strict=True):
        assert start + need <= end


@pytest.fixture
def alone() -> PeerAll2All:
    """One rank of two, which has joined without the other."""
    group = SimpleNamespace(size=2)
    resources = SimpleNamespace(declare=lambda key, nbytes, scope: None)
    parallel = SimpleNamespace(tp=group, ep=group)
    ctx: Any = SimpleNamespace(limits=SimpleNamespace(max_tokens=8), parallel=parallel, resources=resources)
    made = PeerAll2All(ctx, WORKLOAD)
    made._rank, made._peers = 0, SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    return made


def test_what_has_no_room_is_refused(alone: PeerAll2All) -> None:
    x, ids, weights = torch.zeros(5, 24), torch.zeros(5, 3, dtype=torch.int32), torch.zeros(5, 3)
    with pytest.raises(ValueError, match=r"5 tokens .* more than the 4 .*--max-num-batched-tokens"):
        alone.dispatch(x, None, ids, weights)
    with pytest.raises(ValueError, match=r"takes 100 bytes, and there are 96; .*--all2all-backend"):
        alone.dispatch(x[:1], torch.ones(1, 1), ids[:1], weights[:1])
    alone.expect([3, 3])
    with pytest.raises(RuntimeError, match="3 tokens were to be dispatched here, not 1"):
        alone.dispatch(x[:1], None, ids[:1], weights[:1])


def test_a_rank_that_has_left(alone: PeerAll2All) -> None:
    alone.close()
    with pytest.raises(RuntimeError, match="left its group"):
        alone.dispatch(torch.zeros(1, 24), None, torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3))
    handle = DispatchHandle(peer_all2all._Sent(torch.zeros(1, 3, dtype=torch.int32), 1))
    with pytest.raises(RuntimeError, match="left its group"):
        alone.combine(torch.zeros(2, 24), handle, torch.zeros(1, 24))
    with pytest.raises(RuntimeError, match="combined already"):
        alone.combine(torch.zeros(2, 24), handle, torch.zeros(1, 24))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_cannot_be_shared_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another all-to-all then serves."""
    device = describe_arch("NVIDIA H100 80GB HBM3", (9, 0))
    assert not PeerAll2All.supports(WORKLOAD, device)
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    (reason,) = PeerAll2All.supports(WORKLOAD, device)
    assert name in str(reason)
