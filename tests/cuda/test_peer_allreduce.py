"""The all-reduce over peer memory among ranks in threads, its kernel in Triton's interpreter."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.summed_ops import summed_trials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.allreduce_add_rms_norm import allreduce_add_rms_norm
from hardpoint.parallel.groups import alone
from hardpoint.parallel.process_group import Store
from hardpoint.plugin_host import discover
from hardpoint.resources import EngineResources
from hardpoint_cuda import peer_allreduce
from hardpoint_cuda.peer_allreduce import MOST_ROWS, PeerAllReduce
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import OpWorkload
from tests.parallel.ranks import on_each
from tests.support.peer_threads import Addresses, interpret_in_threads
from tests.support.two_gpus import two_gpus

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
WORKLOAD = OpWorkload(of="allreduce_add_rms_norm", dtype="bfloat16", parallel="tp", ranks=2, hidden_size=256)
Results = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("kernels are compiled on this machine, and this test interprets them on the host")
    interpret_in_threads(monkeypatch)
    monkeypatch.setattr(peer_allreduce, "PeerMemory", Addresses)


def joined(workload: OpWorkload, rank: int, store: Store) -> tuple[PeerAllReduce, EngineResources]:
    resources = EngineResources()
    ctx: Any = SimpleNamespace(resources=resources, parallel=alone())
    made = PeerAllReduce(ctx, workload, {})
    resources.allocate_collective(torch.device("cpu"))
    made.init(store, rank, workload.ranks or 1, "tp")
    return made, resources


@pytest.mark.parametrize(
    ("ranks", "dtype", "width", "programs"),
    [
        (2, "bfloat16", 256, 512),
        (3, "float16", 40, 2),
        (4, "float32", 7, 512),
        pytest.param(8, "bfloat16", 24, 3, marks=pytest.mark.nightly),
    ],
)
def test_calls_of_unlike_numbers_of_rows(
    ranks: int, dtype: str, width: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are early and late; sums are those of float32 in the order of the ranks, on all of them alike."""
    monkeypatch.setattr(peer_allreduce, "_programs", lambda device, warps: programs)
    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)
    workload = replace(WORKLOAD, ranks=ranks, dtype=dtype, hidden_size=width)
    weight = torch.randn(width, generator=generator).to(kind)
    calls = [torch.randn(ranks + 1, rows, width, generator=generator).to(kind) for rows in (3, 5, 1, 0, 5, 2, 4, 4)]
    calls[0][0, 0, :3] = torch.tensor([-0.0, 1e15 if dtype == "float32" else 3e4, -0.0])
    calls[1][:ranks] = -0.0
    calls[2][ranks - 1, 0, 1] = float("nan")

    def run(rank: int, store: Store) -> Results:
        (made, _resources), pause = joined(workload, rank, store), random.Random(rank)
        found: Results = []
        for call in calls:
            time.sleep(pause.random() * 0.02)
            found.append(made(call[rank].clone(), call[ranks], weight, eps=1e-6))
        made.close()
        with pytest.raises(RuntimeError, match="left its group"):
            made(calls[0][rank], calls[0][ranks], weight, eps=1e-6)
        return found

    found = on_each(ranks, run)
    for number, call in enumerate(calls):
        total = call[0].float()
        for part in call[1:]:
            total = total + part.float()
        wanted = add_rms_norm.reference(total.to(kind), torch.zeros_like(call[ranks]), weight, eps=1e-6)
        for results in found:
            for got, first, want in zip(results[number], found[0][number], wanted, strict=True):
                assert torch.equal(got.nan_to_num(7.0), first.nan_to_num(7.0)), "ranks differ"
                torch.testing.assert_close(got, want, equal_nan=True)
        assert torch.equal(found[0][number][1].nan_to_num(7.0), wanted[1].nan_to_num(7.0))


def test_a_rank_that_leaves_waits_no_longer() -> None:
    members = list[tuple[PeerAllReduce, EngineResources]]()  # whose memory the other rank's kernel writes to

    def run(rank: int, store: Store) -> float:
        made, resources = joined(WORKLOAD, rank, store)
        members.append((made, resources))
        if rank:
            return 0.0
        x = torch.ones(2, 256, dtype=torch.bfloat16)
        timer = threading.Timer(0.2, made.abort)
        timer.start()
        began = time.monotonic()
        made(x, x, x[0], eps=1e-6)
        return time.monotonic() - began

    assert on_each(2, run)[0] >= 0.15


def test_memory_of_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = describe_arch("NVIDIA H200", (9, 0))
    assert PeerAllReduce.supports(WORKLOAD, device) == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (reason,) = PeerAllReduce.supports(WORKLOAD, device)
    assert "expandable" in reason.message


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
def test_the_kit_finds_nothing(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, CudaPlatform, describe_arch("NVIDIA H100 80GB HBM3", (9, 0)), count=8)
    site = replace(Site.open(discover(), "cuda"), device=torch.device("cpu"))
    (offer,) = (one for one in site.plugins.offers("op") if one.contribution.name == "cuda_peer_allreduce")
    tokens = [need for need in offer.contribution.requires if hasattr(need, "max")]
    assert [need.max for need in tokens] == [MOST_ROWS]
    compared = 0
    trials = summed_trials(Subject.load(offer, site), allreduce_add_rms_norm, Plan())
    for trial in islice(trials, 0, None, every):
        for check, finding in trial.run():
            assert not finding.faults, f"{trial.case}, {check}: {finding.faults[0]}"
            compared += check == "values" and finding.outcome == "passed"
    assert compared > 3
