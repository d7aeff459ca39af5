"""The FlashInfer backend without a device: FlashInfer's own wrappers, over a stand-in for its compiled kernels.

The stand-in attends with the reference and looks at nothing but what a kernel is given: indices of pages, lengths,
mask, window, soft cap and scale. Where FlashInfer is not installed, paging and page indices alone are tried.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hardpoint.kernels.page_indices import page_indices
from hardpoint.reference.attention import ReferenceAttention, attend
from hardpoint_cuda import flashinfer_library, flashinfer_plan
from hardpoint_cuda.flashinfer_attention import FlashInferAttention, FlashInferMetadata
from hardpoint_cuda.flashinfer_plan import Paging, decode_tiles
from hardpoint_plugin_api import AttentionCall, AttentionSpec, BuildContext, CapacityError, Span
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.support.attention import MIXED, Piece, run_backend
from tests.support.flashinfer import Event, WithDevice, backend_class, decode_batch, needs_flashinfer

SPEC = AttentionSpec(4, 2, 64, 0.2, "bfloat16", "bfloat16", 16)
STEPS: dict[str, tuple[Piece, ...]] = {
    "mixed": MIXED,
    "decodes": (Piece(1, 1), Piece(1, 16), Piece(1, 17), Piece(1, 90)),
    "prefills": (Piece(20, 20), Piece(4, 70), Piece(16, 32)),
}
FOREIGN = 0
"""A page of somebody else's."""


def positions(piece: Piece, span: Span, block: int) -> range:
    """The positions that a request reads, from the beginning of the first block that any of its queries reads."""
    read = [p for q in range(piece.total - piece.query, piece.total) for p in range(q + 1) if not hidden(span, q, p)]
    return range(min(read) // block * block, piece.total)


def hidden(span: Span, query: int, key: int) -> bool:
    return bool(span.hides(torch.tensor(query), torch.tensor(key)))


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("step", STEPS)
def test_paging_names_every_page_that_is_read(step: str, window: int | None) -> None:
    pieces, span = STEPS[step], Span(window)
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + piece.query)
    paging = Paging.of(starts, [piece.total for piece in pieces], span, 16)
    expected = [positions(piece, span, 16) for piece in pieces]
    assert paging.first.tolist() == [read.start // 16 for read in expected]
    assert paging.lengths.tolist() == [len(read) for read in expected]
    counts = [-(-len(read) // 16) for read in expected]
    assert [b - a for a, b in pairwise(paging.starts.tolist())] == counts
    assert (paging.total, paging.most) == (sum(counts), max(counts))
    assert [(count - 1) * 16 + last for count, last in zip(counts, paging.last.tolist(), strict=True)] == [
        len(read) for read in expected
    ]


@pytest.mark.parametrize("counts", [[1], [3, 1, 7], [1030, 1, 2048]])
def test_page_indices(counts: list[int]) -> None:
    table = torch.randint(1, 10**6, (len(counts), max(counts) + 4), dtype=torch.int32)[:, 1:]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    first = torch.arange(len(counts), dtype=torch.int32)
    out = torch.full((sum(counts) + 2,), -1, dtype=torch.int32)
    page_indices(table, starts, first, max(counts), out)
    expected = torch.cat([row[f : f + n] for row, f, n in zip(table, first, counts, strict=True)])
    assert torch.equal(out, torch.cat([expected, torch.tensor([-1, -1], dtype=torch.int32)]))


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_page_indices_compiles(targets: tuple[str, ...]) -> None:
    signature = dict.fromkeys(("table_ptr", "starts_ptr", "first_ptr", "out_ptr"), "*i32:1") | {"table_stride": "i32"}
    kernel = "hardpoint.kernels.page_indices:_page_indices"
    jobs = [Job(kernel, signature, {"PAGES": 1024}, target) for target in targets]
    assert all(found.spilled == 0 for found in compile_kernels(jobs))


class Compiled:
    """A stand-in for a compiled library. ``plans`` are the arguments of each plan."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []

    def plan(self, *args: Any) -> list[int]:
        self.plans.append(args)
        batch_size, captured = args[7], args[11]
        assert all(x.device.type == "cpu" and x.dtype == torch.int32 for x in args[3:6])
        return [batch_size, int(captured)]

    def paged_run(self, *args: Any) -> None:
        q, keys, values, queries, starts, pages, last, out = args[3:11]
        window, soft_cap, scale = args[14], args[22], args[23]
        assert out.is_contiguous()
        spec = replace(
            SPEC,
            num_heads=q.shape[1],
            num_kv_heads=keys.shape[2],
            scale=scale,
            soft_cap=soft_cap or None,
            window=None if window < 0 else window + 1,
        )
        for i, (a, b) in enumerate(pairwise(starts.tolist())):
            rows = slice(*queries[i : i + 2].tolist())
            read, length = pages[a:b].long(), (b - a - 1) * keys.shape[1] + int(last[i])
            k, v = (x[read].flatten(0, 1)[:length] for x in (keys, values))
            assert args[12] == 1 or rows.stop - rows.start == 1, "several queries need the causal mask"
            out[rows] = attend(q[rows], k, v, spec)


class HostTorch:
    """Torch for FlashInfer's wrappers on a machine without a device."""

    cuda = SimpleNamespace(device=lambda device: contextlib.nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*args, **options)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    """Stand-ins by the name of FlashInfer's own backend."""
    libraries: dict[str, Compiled] = {}
    for name in ("decode", "prefill"):
        module = importlib.import_module(f"flashinfer.{name}")
        monkeypatch.setattr(module, "torch", HostTorch())
        monkeypatch.setattr(
            module, "get_batch_prefill_module", lambda backend, *args: libraries.setdefault(backend, Compiled())
        )
    monkeypatch.setattr(flashinfer_library.Kernel, "load", lambda kernel: None)
    monkeypatch.setattr(flashinfer_plan, "_pinned", lambda size: torch.empty(size, dtype=torch.int32))
    monkeypatch.setattr(flashinfer_plan, "alias", lambda memory: memory)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    return libraries


@needs_flashinfer
@pytest.mark.parametrize("changes", [{}, {"window": 20}, {"soft_cap": 3.0, "num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_steps_through_the_wrappers(compiled: dict[str, Compiled], step: str, changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    out, _ = run_backend(backend_class(), spec, STEPS[step])
    expected, _ = run_backend(ReferenceAttention, spec, STEPS[step])
    torch.testing.assert_close(out, expected)
    decodes = any(piece.query == 1 for piece in STEPS[step])
    prefills = any(piece.query > 1 for piece in STEPS[step])
    assert set(compiled) == ({"fa2"} if decodes else set()) | ({"fa3"} if prefills else set())


@needs_flashinfer
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("is_captured", [True, False])
def test_steps_of_growing_lengths(compiled: dict[str, Compiled], is_captured: bool, window: int | None) -> None:
    """Steps of two sizes take turns; what a graph holds on to is the first metadata of its size."""
    spec, generator = replace(SPEC, window=window), torch.Generator().manual_seed(0)
    ctx = WithDevice()
    backend = FlashInferAttention(cast(BuildContext, ctx), spec)
    ctx.resources.allocate(torch.device("cpu"))
    backend.set_head_constants(None, None)
    pages = 61
    buffer = torch.zeros(pages * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8)
    cache = backend.layout.views(buffer, pages, backend.cache_spec, 16)
    for view in cache.values():
        view.copy_(torch.randn(view.shape, generator=generator))
        view[FOREIGN] = float("nan")
    captured: dict[int, FlashInferMetadata] = {}
    reference = ReferenceAttention(cast(BuildContext, None), spec)
    for lengths in ((1, 1, 1), (1,), (5, 90, 17), (300,), (6, 91, 18), (320, 1, 1), (17,)):
        n = len(lengths)
        table = (torch.rand(n, pages - 1, generator=generator).argsort(-1) + 1).int()[:, :20].contiguous()
        for row, length in zip(table, lengths, strict=True):
            row[: spec.span.first(length - 1) // 16] = FOREIGN
            row[-(-length // 16) :] = FOREIGN
        batch = replace(decode_batch(lengths, table), graph_key=n if is_captured else None)
        planned = backend.plan(batch)
        metadata = captured.setdefault(n, planned) if is_captured else planned
        assert planned.token == metadata.token
        q = torch.randn(n, spec.num_heads, spec.head_size, generator=generator).bfloat16()
        out, expected = torch.empty_like(q), torch.empty_like(q)
        backend.forward(AttentionCall(q, q, q, cache, metadata, out))
        reference.forward(AttentionCall(q, q, q, cache, reference.plan(batch), expected))
        torch.testing.assert_close(out, expected)
    assert {plan[11] for plan in compiled["fa2"].plans} == {is_captured}, "planned to be captured, or not"


@needs_flashinfer
def test_a_capture_too_large_for_the_workspace_says_what_it_needs(compiled: dict[str, Compiled]) -> None:
    ctx = WithDevice(workspace_mib=2)
    backend = FlashInferAttention(cast(BuildContext, ctx), SPEC)
    ctx.resources.allocate(torch.device("cpu"))
    n = next(n for n in range(1, 10**6) if decode_tiles(n, 2) > 2**21 // (4 * 16 * 4 * 65))
    with pytest.raises(CapacityError, match="flashinfer_workspace_mib to 3"):
        backend.plan(decode_batch((1,) * n, torch.zeros(n, 1, dtype=torch.int32)))


@needs_flashinfer
def test_a_sleeping_engine_gets_its_workspace_back(compiled: dict[str, Compiled]) -> None:
    """After sleep the workspace lies elsewhere; wrappers over the old one are not used again."""
    ctx = WithDevice()
    backend = FlashInferAttention(cast(BuildContext, ctx), SPEC)
    ctx.resources.allocate(torch.device("cpu"))
    batch = decode_batch((3,), torch.ones(1, 1, dtype=torch.int32))
    (first, _), *_ = backend.plan(batch).parts
    held = ctx.resources.get("flashinfer_workspace")  # so that the new one cannot take its place
    ctx.resources.drop()
    ctx.resources.restore()
    (second, _), *_ = backend.plan(batch).parts
    assert second is not first
    assert held.data_ptr() != ctx.resources.get("flashinfer_workspace").data_ptr()


@pytest.mark.parametrize("where", ["offset", "apart", "far", "wide heads"])
def test_queries_that_kernels_cannot_read_are_copied(where: str) -> None:
    from hardpoint_cuda.flashinfer_attention import readable

    plain = torch.arange(3 * 2 * 64, dtype=torch.bfloat16).view(3, 2, 64)
    assert readable(plain) is plain
    qkv = torch.zeros(3, 4, 64, dtype=torch.bfloat16)
    assert readable(qkv[:, :2]).data_ptr() == qkv.data_ptr(), "a part of a merged projection is read in place"
    storage = torch.zeros(2000, dtype=torch.bfloat16)
    shape, strides, offset = {
        "offset": ((3, 2, 64), (128, 64, 1), 1),
        "apart": ((3, 2, 64), (128 + 11, 64, 1), 0),
        "far": ((1, 2, 64), (2**31, 64, 1), 0),
        "wide heads": ((3, 2, 64), (128, 64, 2), 0),
    }[where]
    x = storage.as_strided(shape, strides, offset)
    copy = readable(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
    assert copy.data_ptr() != x.data_ptr()
