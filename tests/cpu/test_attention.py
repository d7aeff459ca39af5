"""The compiled attention kernels at every level of this CPU, against the references; and recorded calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.nvfp4_cache_attention import Nvfp4CacheAttention
from hardpoint.reference.quantized_cache_attention import QuantizedCacheAttention
from hardpoint_cpu.native_attention import NativeAttention, NativeNvfp4CacheAttention, NativeQuantizedCacheAttention
from hardpoint_cpu.recorded_list import RecordedLists
from hardpoint_plugin_api import NVFP4, AttentionBackend, AttentionBatch, AttentionCall, AttentionSpec, StoreCall
from tests.cpu.building import needs_kernels
from tests.support.attention import MIXED, Piece, run_backend

needs_kernels()


PLAIN = AttentionSpec(4, 2, 64, 0.125, "bfloat16", "bfloat16", 16)
SPECS = {
    "plain": PLAIN,
    "float16": replace(PLAIN, dtype="float16", kv_dtype="float16", head_size=80),
    "other cache": replace(PLAIN, kv_dtype="float32", block_size=5),
    "odd head, window": replace(PLAIN, dtype="float32", kv_dtype="float32", head_size=33, window=7),
    "chunk, one page each": replace(PLAIN, num_heads=8, num_kv_heads=1, block_size=1, chunk=7),
    "cap": replace(PLAIN, soft_cap=2.0, head_size=128),
    "sinks, slopes": replace(PLAIN, sinks=True, alibi=True, num_heads=10),
    "int8": replace(PLAIN, kv_dtype="int8"),
    "float8": replace(PLAIN, kv_dtype="float8_e4m3fn", window=40),
    "float8_e5m2": replace(PLAIN, dtype="float32", kv_dtype="float8_e5m2", head_size=33),
    "nvfp4": replace(PLAIN, kv_dtype=NVFP4, head_size=48, window=40),
    "nvfp4, float32": replace(PLAIN, dtype="float32", kv_dtype=NVFP4, block_size=5, num_heads=6),
    "nvfp4, float16": replace(PLAIN, dtype="float16", kv_dtype=NVFP4, head_size=128, num_kv_heads=1),
}
SPLIT = (Piece(1, 1300), Piece(20, 150))
"""A decode long enough for several splits beside a chunk of a prompt."""
SCALED = ("int8", "float8_e4m3fn", "float8_e5m2")
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Of a row's norm: a few roundings of a dtype's size."""


def is_scaled(spec: AttentionSpec) -> bool:
    return spec.kv_dtype in SCALED


def kinds(spec: AttentionSpec) -> tuple[type[AttentionBackend], type[AttentionBackend]]:
    if spec.kv_dtype == NVFP4:
        return NativeNvfp4CacheAttention, Nvfp4CacheAttention
    if is_scaled(spec):
        return NativeQuantizedCacheAttention, QuantizedCacheAttention
    return NativeAttention, ReferenceAttention


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pieces", [MIXED, SPLIT], ids=["mixed", "split"])
def test_every_level_computes_what_the_reference_does(level: str, name: str, pieces: tuple[Piece, ...]) -> None:
    spec = SPECS[name]
    sinks = torch.randn(spec.num_heads, generator=torch.Generator().manual_seed(1)) if spec.sinks else None
    slopes = torch.linspace(0.01, 0.3, spec.num_heads) if spec.alibi else None
    ours, reference = (run_backend(kind, spec, pieces, sinks=sinks, alibi_slopes=slopes)[0] for kind in kinds(spec))
    errors = (ours.double() - reference.double()).norm(dim=-1) / reference.double().norm(dim=-1)
    assert errors.max() < TOLERANCE[spec.dtype]


STORED = [(dtype, False) for dtype in ("float32", "float16", "bfloat16", *SCALED, NVFP4)]
STORED += [(dtype, True) for dtype in (*SCALED, NVFP4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_without_weight_come_first(level: str, dtype: str) -> None:
    """The slopes leave all but the nearest three keys a score of -inf, whole tiles of them before there is another."""
    spec = replace(PLAIN, dtype=dtype, kv_dtype=dtype, alibi=True)
    slopes = torch.full((spec.num_heads,), 1e38)
    ours, reference = (run_backend(kind, spec, SPLIT, alibi_slopes=slopes)[0] for kind in kinds(spec))
    assert torch.allclose(ours.double(), reference.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("kv_dtype", "static"), STORED)
def test_stores_what_the_reference_does(level: str, kv_dtype: str, static: bool) -> None:
    size = 48 if kv_dtype == NVFP4 else 33
    spec = replace(PLAIN, dtype="float32", kv_dtype=kv_dtype, head_size=size, static_cache_scales=static)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, spec.num_kv_heads, spec.head_size, generator=generator)
    x *= torch.tensor([1e-9, 1e-3, 1.0, 1e3]).repeat(10)[:, None, None]
    x[0, 0], x[1, 1] = 0, x[1, 1].round()
    slots = torch.arange(16, 56, dtype=torch.int32)
    caches = []
    for kind in kinds(spec):
        backend = kind(None, spec)  # type: ignore[arg-type]  # no backend here asks for a context
        if static:
            backend.set_cache_scales(torch.tensor([0.06]), torch.tensor([0.11]))
        buffer = torch.zeros(4 * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8)
        backend.store(StoreCall(x[0], x[1], backend.layout.views(buffer, 4, backend.cache_spec, 16), slots))
        caches.append(buffer)
    assert torch.equal(*caches)


def test_a_recorded_call_serves_other_lengths_and_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    backend = NativeAttention(None, PLAIN)  # type: ignore[arg-type]
    pages, block = 101, PLAIN.block_size
    buffer = torch.zeros(pages * backend.layout.page_bytes(backend.cache_spec, block), dtype=torch.uint8)
    cache = backend.layout.views(buffer, pages, backend.cache_spec, block)
    for view in cache.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    batch = AttentionBatch(
        query_start=torch.arange(3, dtype=torch.int32),
        seq_lens=torch.ones(2, dtype=torch.int32),
        block_table=torch.zeros(2, 100, dtype=torch.int32),
        slot_mapping=torch.zeros(2, dtype=torch.int32),
        query_start_host=(0, 1, 2),
        seq_lens_host=(1, 1),
        num_decodes=2,
        graph_key=2,
    )
    q = torch.randn(2, PLAIN.num_heads, PLAIN.head_size, generator=generator).bfloat16()
    k = v = torch.empty(2, PLAIN.num_kv_heads, PLAIN.head_size, dtype=torch.bfloat16)

    def forward(q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        backend.forward(AttentionCall(q, k, v, cache, backend.plan(batch), out))
        return out

    graph = RecordedLists().prepare("decode", forward, {"q": q})
    for lengths in ((5, 17), (1500, 1)):
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.block_table.copy_((torch.rand(2, 100, generator=generator).argsort(-1) + 1).int())
        reference = ReferenceAttention(None, PLAIN)  # type: ignore[arg-type]
        expected = torch.empty_like(q)
        reference.forward(
            AttentionCall(q, k, v, cache, reference.plan(replace(batch, seq_lens_host=lengths)), expected)
        )
        torch.testing.assert_close(graph.run(), expected, rtol=0.02, atol=0.01)


def test_a_batch_of_any_shape_says_on_the_device_whose_queries_are_whose() -> None:
    generator = torch.Generator().manual_seed(0)
    backend = NativeAttention(None, PLAIN)  # type: ignore[arg-type]
    buffer = torch.zeros(4 * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8)
    cache = backend.layout.views(buffer, 4, backend.cache_spec, 16)
    for view in cache.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    q = torch.randn(4, PLAIN.num_heads, PLAIN.head_size, generator=generator).bfloat16()
    k = v = torch.empty(4, PLAIN.num_kv_heads, PLAIN.head_size, dtype=torch.bfloat16)
    batch = AttentionBatch(
        query_start=torch.tensor([0, 3, 4, 4, 4], dtype=torch.int32),
        seq_lens=torch.tensor([20, 9, 1, 1], dtype=torch.int32),
        block_table=torch.tensor([[1, 2], [3, 0], [0, 0], [0, 0]], dtype=torch.int32),
        slot_mapping=torch.zeros(4, dtype=torch.int32),
        query_start_host=(0, 4, 4, 4, 4),
        seq_lens_host=(4, 1, 1, 1),
        num_decodes=0,
        graph_key=("tokens", 4),
        any_shape=True,
    )
    told = replace(batch, query_start_host=(0, 3, 4, 4, 4), seq_lens_host=(20, 9, 1, 1), any_shape=False)
    reference = ReferenceAttention(None, PLAIN)  # type: ignore[arg-type]
    got, expected = torch.empty_like(q), torch.empty_like(q)
    backend.forward(AttentionCall(q, k, v, cache, backend.plan(batch), got))
    reference.forward(AttentionCall(q, k, v, cache, reference.plan(told), expected))
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.01)
