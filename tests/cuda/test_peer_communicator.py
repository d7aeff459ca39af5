"""The communicator over peer memory among ranks in threads, its kernels in Triton's interpreter."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.communicator import CommunicatorTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.parallel.groups import alone
from hardpoint.parallel.process_group import Store
from hardpoint.plugin_host import discover
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint.resources import EngineResources
from hardpoint_cuda import peer_communicator
from hardpoint_cuda.peer_communicator import PeerCommunicator
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import CommunicatorWorkload
from tests.parallel.ranks import on_each
from tests.support.peer_threads import Addresses, interpret_in_threads
from tests.support.two_gpus import two_gpus

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Act = Callable[[PeerCommunicator, int], list[torch.Tensor]]
LIBRARY = ("all_reduce", "all_gather")
"""Collectives that the base class takes from torch.distributed."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("kernels are compiled on this machine, and this test interprets them on the host")
    interpret_in_threads(monkeypatch)
    monkeypatch.setattr(peer_communicator, "PeerMemory", Addresses)
    monkeypatch.setattr(peer_communicator, "SLOT_BYTES", 1 << 16)
    monkeypatch.setattr(peer_communicator, "PROGRAMS", 3)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the library's collectives fail."""

    def fail(*_: object) -> torch.Tensor:
        raise AssertionError("the library was called")

    for name in LIBRARY:
        monkeypatch.setattr(TorchDistributed, name, fail)


def on_ranks(ranks: int, act: Act, dtype: str = "bfloat16") -> list[list[torch.Tensor]]:
    held = list[EngineResources]()  # memory that other ranks' kernels write to

    def run(rank: int, store: Store) -> list[torch.Tensor]:
        resources = EngineResources()
        held.append(resources)
        ctx: Any = SimpleNamespace(resources=resources, parallel=alone())
        made = PeerCommunicator(ctx, CommunicatorWorkload(dtype=dtype, parallel="tp", ranks=ranks))
        resources.allocate_collective(torch.device("cpu"))
        made.init(store, rank, ranks, "tp")
        try:
            return act(made, rank)
        finally:
            made.close()

    return on_each(ranks, run)


def drawn(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(ranks)]


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.nightly)])
def test_small_tensors_need_no_library(ranks: int) -> None:
    """Ranks early and late, calls of unlike sizes in turns; sums are those of float32 in the order of the ranks."""
    shapes = [(3, 8), (1, 4096), (5, 24), (2, 8), (40, 8), (1, 8), (4, 2064)]
    calls = [drawn(ranks, shape, torch.bfloat16, seed) for seed, shape in enumerate(shapes)]

    def act(made: PeerCommunicator, rank: int) -> list[torch.Tensor]:
        pause, found = random.Random(rank), []
        for call in calls:
            time.sleep(pause.random() * 0.02)
            own = call[rank].clone()
            found += [made.all_gather_columns(own), made.all_gather(own[:, :8].contiguous()), made.all_reduce(own)]
        return found

    for found in on_ranks(ranks, act):
        for number, call in enumerate(calls):
            columns, rows, total = found[3 * number :][:3]
            assert torch.equal(columns, torch.cat(call, 1))
            assert torch.equal(rows, torch.cat([part[:, :8] for part in call]))
            wanted = torch.zeros_like(call[0], dtype=torch.float32)
            for part in call:
                wanted += part.float()
            assert torch.equal(total, wanted.bfloat16())


@pytest.mark.usefixtures("without_library")
def test_what_does_not_begin_at_a_vector_is_copied() -> None:
    given = drawn(2, (41,), torch.float32, 0)

    def act(made: PeerCommunicator, rank: int) -> list[torch.Tensor]:
        own = given[rank][1 + rank :][:36].view(3, 12)
        return [made.all_gather_columns(own), made.all_reduce(own)]

    parts = [x[1 + rank :][:36].view(3, 12) for rank, x in enumerate(given)]
    for columns, total in on_ranks(2, act, "float32"):
        assert torch.equal(columns, torch.cat(parts, 1))
        assert torch.equal(total, parts[0] + parts[1])


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("all_reduce", (3, 3), torch.bfloat16),
        ("all_reduce", (3, 8), torch.float32),
        ("all_reduce", (9, 4096), torch.bfloat16),
        ("all_gather", (2, 5), torch.uint8),
        ("all_gather", (0, 8), torch.bfloat16),
        ("all_gather_columns", (4, 7), torch.bfloat16),
        ("all_gather_columns", (0, 8), torch.bfloat16),
        ("all_gather_columns", (9, 4096), torch.bfloat16),
    ],
)
def test_the_library_takes_the_rest(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes, other dtypes, large tensors, and none."""
    given = drawn(2, shape, dtype, 1)
    calls = list[str]()
    for method in LIBRARY:
        real = getattr(TorchDistributed, method)

        def counted(self: object, *args: object, real: Any = real) -> torch.Tensor:
            calls.append(real.__name__)
            found: torch.Tensor = real(self, *args)
            return found

        monkeypatch.setattr(TorchDistributed, method, counted)
    wanted = {
        "all_reduce": given[0] + given[1],
        "all_gather": torch.cat(given),
        "all_gather_columns": torch.cat(given, 1),
    }[name]
    found = on_ranks(2, lambda made, rank: [getattr(made, name)(given[rank].clone())])
    assert all(torch.equal(got, wanted) for (got,) in found)
    assert calls == [name.removesuffix("_columns")] * 2


def test_a_rank_that_leaves_waits_no_longer() -> None:
    """The other rank never comes to the call, and both raise afterwards."""

    def act(made: PeerCommunicator, rank: int) -> list[torch.Tensor]:
        began = time.monotonic()
        if rank:
            made.abort()
        else:
            threading.Timer(0.2, made.abort).start()
        with pytest.raises(RuntimeError, match="left its group"):
            made.all_gather_columns(torch.ones(2, 8))
        assert rank or time.monotonic() - began >= 0.15
        with pytest.raises(RuntimeError, match="left its group"):
            made.all_reduce(torch.ones(2, 8, dtype=torch.bfloat16))
        return []

    on_ranks(2, act)


def test_memory_of_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, workload = describe_arch("NVIDIA H200", (9, 0)), CommunicatorWorkload(dtype="bfloat16", ranks=2)
    assert PeerCommunicator.supports(workload, device) == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (reason,) = PeerCommunicator.supports(workload, device)
    assert "expandable" in reason.message


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
def test_the_kit_finds_nothing(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, CudaPlatform, describe_arch("NVIDIA H100 80GB HBM3", (9, 0)), count=8)
    site = replace(Site.open(discover(), "cuda"), device=torch.device("cpu"))
    (offer,) = (one for one in site.plugins.offers("communicator") if one.contribution.name == "cuda_peer")
    compared = 0
    trials = CommunicatorTrials().trials(Subject.load(offer, site), Plan())
    for trial in islice(trials, 0, None, every):
        for check, finding in trial.run():
            assert not finding.faults, f"{trial.case}, {check}: {finding.faults[0]}"
            compared += check == "values" and finding.outcome == "passed"
    assert compared > 3
