"""FlashInfer's kernels on a device: those that are compiled, or that can be there, a minute or two each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from hardpoint.reference.attention import ReferenceAttention
from hardpoint_cuda.platform import CudaPlatform
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionSpec,
    BuildContext,
    DeviceInfo,
)
from tests.support.attention import MIXED, Piece, run_backend
from tests.support.flashinfer import WithDevice, backend_class, needs_flashinfer, needs_kernels
from tests.support.waits import waits_are_errors

pytestmark = [pytest.mark.accelerator, needs_flashinfer]

PLAIN = AttentionSpec(8, 2, 128, 0.1, "bfloat16", "bfloat16", 16)
SPECS = {
    "plain": PLAIN,
    "plain, mha": replace(PLAIN, num_kv_heads=8),
    "plain, group of 16": replace(PLAIN, num_heads=16, num_kv_heads=1),
    "window": replace(PLAIN, window=20),
    "cap": replace(PLAIN, soft_cap=3.0),
    "window, cap, float16, 64": replace(
        PLAIN, window=20, soft_cap=3.0, dtype="float16", kv_dtype="float16", head_size=64
    ),
    "256": replace(PLAIN, head_size=256, block_size=64),
}
STEPS: dict[str, tuple[Piece, ...]] = {
    "mixed": MIXED,
    "decodes": tuple(Piece(1, 1 + 97 * i) for i in range(40)),
    "prefills": (Piece(300, 300), Piece(4, 700), Piece(129, 1000)),
    "long": (Piece(1, 20000), Piece(40, 9000)),
}
PAGES, WIDTH = 400, 200


@dataclass(frozen=True)
class Machine:
    """The platform with its device made active."""

    platform: CudaPlatform
    device: torch.device

    def build(self, spec: AttentionSpec) -> AttentionBackend:
        ctx: Any = WithDevice(device=self.platform.info, workspace_mib=256)
        backend = backend_class(device=self.platform.info, workspace_mib=256)(ctx, spec)
        ctx.resources.allocate(self.device)
        backend.set_head_constants(None, None)
        return backend


@pytest.fixture(scope="module")
def machine() -> Machine:
    info = CudaPlatform.detect()
    assert isinstance(info, DeviceInfo), info
    platform = CudaPlatform(info)
    return Machine(platform, platform.activate(0))


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To a few roundings of the dtype, of a row's norm."""
    errors = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert errors.max() < 4 * torch.finfo(expected.dtype).eps


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SPECS)
def test_steps_match_the_reference(machine: Machine, name: str, step: str) -> None:
    spec, pieces = SPECS[name], STEPS[step]
    needs_kernels(spec, machine.platform.info)
    ours = backend_class(device=machine.platform.info, workspace_mib=256)
    out, _ = run_backend(ours, spec, pieces, device=machine.device)
    agree(out, run_backend(ReferenceAttention, spec, pieces, device=machine.device)[0])


class Decoding:
    """A backend over random pages, and the fixed arrays of a step of ``n`` requests."""

    def __init__(self, machine: Machine, spec: AttentionSpec, n: int) -> None:
        self.n, self.spec, device = n, spec, machine.device
        self.backend = machine.build(spec)
        self.reference = ReferenceAttention(cast(BuildContext, None), spec)
        layout, cached = self.backend.layout, self.backend.cache_spec
        buffer = torch.zeros(PAGES * layout.page_bytes(cached, spec.block_size), dtype=torch.uint8, device=device)
        self.cache = layout.views(buffer, PAGES, cached, spec.block_size)
        for view in self.cache.values():
            view.normal_()
            view[0] = float("nan")
        self.q = torch.zeros(n, spec.num_heads, spec.head_size, dtype=torch.bfloat16, device=device)
        self.table = torch.zeros(n, WIDTH, dtype=torch.int32, device=device)
        self.lengths = torch.ones(n, dtype=torch.int32, device=device)
        self.starts = torch.arange(n + 1, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.q)

    def load(self, lengths: list[int]) -> AttentionBatch:
        """Fresh queries, pages and lengths in the fixed arrays; pages that are not read are the null page."""
        self.q.normal_()
        tables = (torch.rand(self.n, PAGES - 1).argsort(-1)[:, :WIDTH] + 1).int()
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32).pin_memory(), non_blocking=True)
        self.table.copy_(tables.pin_memory(), non_blocking=True)
        for row, length in zip(self.table, lengths, strict=True):
            row[: self.spec.span.first(length - 1) // self.spec.block_size] = 0
            row[-(-length // self.spec.block_size) :] = 0
        return AttentionBatch(
            query_start=self.starts,
            seq_lens=self.lengths,
            block_table=self.table,
            slot_mapping=self.lengths,
            query_start_host=tuple(range(self.n + 1)),
            seq_lens_host=tuple(lengths),
            num_decodes=self.n,
            graph_key=self.n,
        )

    def expected(self, batch: AttentionBatch) -> torch.Tensor:
        out = torch.empty_like(self.out)
        self.reference.forward(AttentionCall(self.q, self.q, self.q, self.cache, self.reference.plan(batch), out))
        return out


@pytest.mark.parametrize("name", ["plain", "window"])
@pytest.mark.parametrize("n", [1, 5, 64])
def test_a_captured_decode_is_replayed_as_contexts_grow(machine: Machine, name: str, n: int) -> None:
    needs_kernels(SPECS[name], machine.platform.info)
    decoding = Decoding(machine, SPECS[name], n)
    backend = decoding.backend
    with torch.inference_mode():
        metadata = backend.plan(decoding.load([1] * n))

        def forward(**_: Any) -> torch.Tensor:
            backend.forward(AttentionCall(decoding.q, decoding.q, decoding.q, decoding.cache, metadata, decoding.out))
            return decoding.out

        graph = machine.platform.graph_engine().prepare("decode", forward, {"q": decoding.q})
        for longest in (1, 2, 16, 17, 300, 301, 3000, 5):
            batch = decoding.load([1 + (longest - 1) * (i + 1) // n for i in range(n)])
            assert backend.plan(batch).token == metadata.token
            agree(graph.run(), decoding.expected(batch))


def test_planning_never_waits_for_the_device(machine: Machine) -> None:
    decoding = Decoding(machine, PLAIN, 8)
    batch = decoding.load([100 + i for i in range(8)])
    for _ in range(3):  # what is made once is made; both sets of pinned memory have been used
        decoding.backend.plan(batch)
        decoding.backend.plan(replace(batch, graph_key=None))
    torch.cuda.synchronize()
    with waits_are_errors(torch.cuda):
        decoding.backend.plan(batch)
        decoding.backend.plan(replace(batch, graph_key=None))


def test_steps_planned_ahead_keep_their_own_plans(machine: Machine) -> None:
    """The device is kept busy while the host plans and submits several steps: none may overwrite another's plan."""
    decoding = Decoding(machine, PLAIN, 4)
    busy = torch.randn(4096, 4096, device=machine.device)
    batches, results, expected = [], [], []
    for longest in (17, 900, 40, 2000, 3):
        batch = decoding.load([longest] * 4)
        batch = replace(batch, block_table=batch.block_table.clone(), graph_key=4)
        batches.append((batch, decoding.q.clone()))
        expected.append(decoding.expected(batch))
    torch.cuda.synchronize()
    for _ in range(200):
        busy = busy @ busy.clamp(-1e-3, 1e-3)
    for batch, q in batches:
        out = torch.empty_like(q)
        decoding.backend.forward(AttentionCall(q, q, q, decoding.cache, decoding.backend.plan(batch), out))
        results.append(out)
    for found, wanted in zip(results, expected, strict=True):
        agree(found, wanted)
