"""FlashInfer's all-reduce fusion without GPUs: which groups and rows it takes, and how its memory is laid out.

Two parts that need CUDA are replaced: the handles, by addresses (ranks are threads), and the kernel, by one on the host
that reads the same table of addresses.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hardpoint_cuda
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.parallel.groups import alone
from hardpoint.parallel.process_group import Store
from hardpoint.resources import EngineResources
from hardpoint_cuda import flashinfer_allreduce
from hardpoint_cuda.flashinfer_allreduce import MOST_TOKENS, FlashInferAllReduce, fits
from hardpoint_cuda.platform import describe_arch
from hardpoint_plugin_api import (
    CheckContext,
    Contribution,
    Feature,
    OpWorkload,
    Request,
    TokensRequirement,
    read_manifest,
)
from hardpoint_plugin_api.versions import ApiVersion
from tests.parallel.ranks import on_each

WORKLOAD = OpWorkload(of="allreduce_add_rms_norm", dtype="bfloat16", parallel="tp", ranks=2, hidden_size=256)
H200 = replace(describe_arch("NVIDIA H200", (9, 0)), features=frozenset({"p2p"}))


@pytest.fixture
def contribution() -> Contribution:
    manifest = read_manifest(Path(hardpoint_cuda.__file__).parent / "hardpoint.toml")
    return next(c for c in manifest.contributions if c.name == "cuda_flashinfer_allreduce")


def codes(contribution: Contribution, workload: OpWorkload, device: Any = H200) -> set[str]:
    """Of the reasons against it, but for packages."""
    context = CheckContext(Request(device, workload), ApiVersion(0, 2))
    found = [reason for need in contribution.requirements if (reason := need.check(context))]
    return {reason.code for reason in found if not reason.code.startswith("package")}


def test_what_it_is_for(contribution: Contribution) -> None:
    assert codes(contribution, WORKLOAD) == set()
    assert codes(contribution, replace(WORKLOAD, dtype="float32")) == {"dtype"}
    assert codes(contribution, replace(WORKLOAD, features=frozenset({Feature.SEVERAL_HOSTS}))) == {"feature"}
    assert codes(contribution, WORKLOAD, replace(H200, features=frozenset())) == {"device-feature"}
    assert codes(contribution, WORKLOAD, replace(H200, arch="sm_89")) == {"arch"}
    (tokens,) = [need for need in contribution.requires if isinstance(need, TokensRequirement)]
    assert tokens == TokensRequirement(max=MOST_TOKENS)


def test_groups_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_allreduce, "reasons", lambda kernels: [])
    assert FlashInferAllReduce.supports(WORKLOAD, H200) == []
    (reason,) = FlashInferAllReduce.supports(replace(WORKLOAD, ranks=3), H200)
    assert (reason.code, reason.wanted, reason.supported) == ("ranks", "3", "2, 4, 8")
    (reason,) = FlashInferAllReduce.supports(replace(WORKLOAD, hidden_size=2880), H200)
    assert reason.code == "hidden-size"


def test_blocks_of_whole_warps() -> None:
    """2880 makes two blocks of 180 threads of a row, 9216 eight of 144."""
    assert all(map(fits, (1024, 2048, 2560, 4096, 5120, 8192, 16384)))
    assert not any(map(fits, (64, 129, 2880, 9216)))


class Peers:
    """As PeerMemory, for ranks in threads and memory of the host."""

    def __init__(self, own: torch.Tensor, store: Store, rank: int, world: int, seconds: float) -> None:
        store.set(f"memory/{rank}", str(own.data_ptr()))
        self.pointers = tuple(int(store.get(f"memory/{other}")) for other in range(world))

    def close(self) -> None:
        pass


class Comm:
    """As flashinfer.comm: the one-shot kernel's way through the workspace, once."""

    class AllReduceFusionWorkspace:
        def __init__(self, world_size: int, rank: int) -> None:
            self.world_size, self.rank = world_size, rank

    class TRTLLMAllReduceFusionWorkspace(AllReduceFusionWorkspace):
        pass

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm=1)

    @staticmethod
    def allreduce_fusion(
        *,
        input: torch.Tensor,
        output: torch.Tensor,
        workspace: Any,
        pattern: int,
        residual_in: torch.Tensor,
        residual_out: torch.Tensor,
        norm_out: torch.Tensor,
        rms_gamma: torch.Tensor,
        rms_eps: float,
        fp32_acc: bool,
    ) -> None:
        assert pattern == 1
        assert output is input
        rank, world, table = workspace.rank, workspace.world_size, workspace.workspace_tensor.tolist()
        assert len(table) == 3 * world + 1
        control = (ctypes.c_int32 * 5).from_address(table[-1])
        size = control[3]
        assert list(control) == [0, 0, 0, world * MOST_TOKENS * input.shape[1] * 2, 0]
        assert workspace.metadata["max_token_num"] == MOST_TOKENS
        for flags in table[world : 2 * world]:
            assert bytes((ctypes.c_byte * (world * 256 * 4)).from_address(flags)) == bytes(world * 256 * 4)
        last = bytes((ctypes.c_byte * 2).from_address(table[2 * world + rank] + 3 * size - 2))
        assert last == b"\x00\x80"
        given = input.contiguous().view(torch.uint8).flatten()
        for buffer in table[2 * world : 3 * world]:
            ctypes.memmove(buffer + rank * given.numel(), given.data_ptr(), given.numel())
        raw = (ctypes.c_byte * (world * given.numel())).from_address(table[2 * world + rank])
        while True:
            arrived = torch.frombuffer(bytearray(raw), dtype=torch.int16)
            if not (arrived == torch.iinfo(torch.int16).min).any():
                break
            time.sleep(0.001)
        total = arrived.view(torch.bfloat16).view(world, *input.shape).float().sum(0).to(torch.bfloat16)
        results = add_rms_norm.reference(total, residual_in, rms_gamma, eps=rms_eps)
        for out, result in zip((norm_out, residual_out), results, strict=True):
            out.copy_(result)


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_allreduce, "PeerMemory", Peers)
    monkeypatch.setattr(flashinfer_allreduce, "module", lambda name: Comm)
    monkeypatch.setattr(flashinfer_allreduce, "COMMUNICATION", SimpleNamespace(load=lambda: None))


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_find_each_other(world: int) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(world + 1, 5, 256, generator=generator).to(torch.bfloat16)
    weight = torch.randn(256, generator=generator).to(torch.bfloat16)

    def run(rank: int, store: Store) -> tuple[torch.Tensor, torch.Tensor]:
        resources = EngineResources()
        ctx: Any = SimpleNamespace(resources=resources, parallel=alone())
        made = FlashInferAllReduce(ctx, replace(WORKLOAD, ranks=world), {})
        resources.allocate_collective(torch.device("cpu"))
        made.init(store, rank, world, "tp")
        empty, _ = made(drawn[0][:0], drawn[world][:0], weight, eps=1e-6)
        assert empty.shape == (0, 256)
        results = made(drawn[rank].clone(), drawn[world], weight, eps=1e-6)
        made.close()
        with pytest.raises(RuntimeError, match="left its group"):
            made(drawn[rank], drawn[world], weight, eps=1e-6)
        return results

    total = drawn[:world].float().sum(0).to(torch.bfloat16)
    wanted = add_rms_norm.reference(total, drawn[world], weight, eps=1e-6)
    for results in on_each(world, run):
        assert all(map(torch.equal, results, wanted))
