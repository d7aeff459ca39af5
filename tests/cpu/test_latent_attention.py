"""The compiled kernels of latent attention at every level of this CPU, against the reference; and recorded calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint.reference.quantized_latent_attention import QuantizedLatentAttention
from hardpoint_cpu import native, native_latent_attention
from hardpoint_cpu.native_latent_attention import (
    NativeBatchInvariantLatentAttention,
    NativeLatentAttention,
    NativeQuantizedLatentAttention,
)
from hardpoint_cpu.recorded_list import RecordedLists
from hardpoint_plugin_api import AttentionBatch, LatentBackend, LatentCall, LatentSpec, LatentStoreCall
from hardpoint_plugin_api.elements import BUILT_IN
from tests.cpu.building import needs_kernels
from tests.cpu.test_attention import SPLIT, TOLERANCE
from tests.support.allocations import LargestTensor
from tests.support.attention import MIXED, Piece
from tests.support.latent import run_latent_backend

needs_kernels()

PLAIN = LatentSpec(16, 64, 16, 0.1, "bfloat16", "bfloat16", 16)
SPECS = {
    "plain": PLAIN,
    "deepseek": replace(PLAIN, latent_size=512, rope_size=64),
    "odd sizes, odd heads": replace(
        PLAIN, num_heads=5, latent_size=33, rope_size=6, dtype="float32", kv_dtype="float32"
    ),
    "one head, one page each": replace(PLAIN, num_heads=1, block_size=1, dtype="float16", kv_dtype="float16"),
    "many heads, other cache": replace(PLAIN, num_heads=80, kv_dtype="float32", block_size=5),
    "no whole tiles": replace(PLAIN, num_heads=5, latent_size=80, rope_size=24, block_size=5),
    "many heads": replace(PLAIN, num_heads=80, latent_size=128, rope_size=32, block_size=32),
    "lists": replace(PLAIN, top_k=21),
    "short lists, odd heads": replace(PLAIN, num_heads=5, top_k=3, dtype="float32", kv_dtype="float32", block_size=5),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pieces", [MIXED, SPLIT], ids=["mixed", "split"])
def test_every_level_computes_what_the_reference_does(level: str, name: str, pieces: tuple[Piece, ...]) -> None:
    spec = SPECS[name]
    ours, reference = (
        run_latent_backend(kind, spec, pieces) for kind in (NativeLatentAttention, ReferenceLatentAttention)
    )
    errors = (ours.double() - reference.double()).norm(dim=-1) / reference.double().norm(dim=-1)
    assert errors.max() < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if "other cache" not in name])
def test_latents_of_8_bits(level: str, name: str, kv_dtype: str) -> None:
    """Both round latents alike."""
    spec = replace(SPECS[name], kv_dtype=kv_dtype)
    for pieces in (MIXED, SPLIT):
        ours, reference = (
            run_latent_backend(kind, spec, pieces).double()
            for kind in (NativeQuantizedLatentAttention, QuantizedLatentAttention)
        )
        assert ((ours - reference).norm(dim=-1) / reference.norm(dim=-1)).max() < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_stores_what_the_reference_does(level: str, kv_dtype: str) -> None:
    spec = replace(PLAIN, dtype="float32", kv_dtype=kv_dtype, latent_size=33, rope_size=6)
    latent, rope_key = torch.randn(40, 50).split([44, 6], dim=-1)
    slots, buffers = torch.arange(16, 56, dtype=torch.int32), []
    kinds: tuple[type[LatentBackend], ...] = (NativeLatentAttention, ReferenceLatentAttention)
    if kv_dtype in BUILT_IN:
        kinds = NativeQuantizedLatentAttention, QuantizedLatentAttention
    for kind in kinds:
        backend = kind(None, spec)  # type: ignore[arg-type]  # no backend here asks for a context
        buffer = torch.zeros(4 * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8)
        cache = backend.layout.views(buffer, 4, backend.cache_spec, 16)
        backend.store(LatentStoreCall(latent[:, :33], rope_key, cache, slots))
        buffers.append(buffer)
    assert torch.equal(*buffers)


MANY = replace(PLAIN, latent_size=512, rope_size=64)
LIMIT = 1 << 26
"""Bytes of partial results that batch-invariant attention may take."""


def test_memory_of_a_batch_invariant_prompt_has_a_limit() -> None:
    """Each query of a chunk over a long context has its splits: 220 MB of partial results for all at once."""
    pieces = (Piece(1, 700), Piece(200, 1900))
    with LargestTensor() as largest:
        found = run_latent_backend(NativeBatchInvariantLatentAttention, MANY, pieces)
    assert LIMIT / 2 < largest.nbytes <= LIMIT
    reference = run_latent_backend(ReferenceLatentAttention, MANY, pieces)
    errors = (found.double() - reference.double()).norm(dim=-1) / reference.double().norm(dim=-1)
    assert errors.max() < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("top_k", [None, 21])
def test_calls_of_few_tokens_have_the_bits_of_one(top_k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little memory there is: less than one query's, one query's, some queries'."""
    spec, pieces = replace(MANY, top_k=top_k), (*MIXED, Piece(30, 700))
    whole = run_latent_backend(NativeBatchInvariantLatentAttention, spec, pieces)
    row = 4 * spec.num_heads * (spec.latent_size + 2)
    for splits in (1, 13, 40):
        monkeypatch.setattr(native_latent_attention, "_PARTIAL_BYTES", splits * row)
        assert torch.equal(run_latent_backend(NativeBatchInvariantLatentAttention, spec, pieces), whole)


@pytest.mark.parametrize(("top_k", "splits"), [(None, 1150), (2048, 36)])
def test_slices_of_a_step(top_k: int | None, splits: int) -> None:
    """They hold its tokens in order, and the kernel, told of so many threads, makes the smallest splits in each.

    16,384 queries at 65,536 positions, all together, would have made larger ones.
    """
    tokens, context = 16384, 65536
    backend = NativeBatchInvariantLatentAttention(None, replace(MANY, top_k=top_k))  # type: ignore[arg-type]
    batch = AttentionBatch(
        query_start=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([context], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int32),
        query_start_host=(0, tokens),
        seq_lens_host=(context,),
        num_decodes=0,
    )
    slices = backend.plan(batch).slices
    assert torch.cat([one.query_start[:-1] for one, _ in slices]).equal(torch.arange(tokens, dtype=torch.int32))
    lengths = torch.cat([one.seq_lens for one, _ in slices])
    assert lengths.equal(torch.arange(context - tokens + 1, context + 1, dtype=torch.int32))
    assert slices[-1][1] // slices[-1][0].num_requests == splits
    row = 4 * MANY.num_heads * (MANY.latent_size + 2)
    for one, count in slices:
        assert len(one.query_start) == one.num_requests + 1
        assert count * row <= LIMIT
        assert int(one.seq_lens.sum()) <= 64 * native.SPLITS_PER_THREAD * native_latent_attention._MANY_THREADS


def test_a_recorded_call_serves_other_lengths_and_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    backend = NativeLatentAttention(None, PLAIN)  # type: ignore[arg-type]
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
    q = torch.randn(2, 16, 80, generator=generator).bfloat16()
    new = torch.empty(2, 80, dtype=torch.bfloat16)

    def call(q: torch.Tensor, batch: AttentionBatch) -> LatentCall:
        out = torch.empty(2, 16, 64, dtype=torch.bfloat16)
        return LatentCall(q[..., :64], q[..., 64:], new[:, :64], new[:, 64:], cache, backend.plan(batch), out)

    def forward(q: torch.Tensor) -> torch.Tensor:
        made = call(q, batch)
        backend.forward(made)
        return made.out

    graph = RecordedLists().prepare("decode", forward, {"q": q})
    for lengths in ((5, 17), (1500, 1)):
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.block_table.copy_((torch.rand(2, 100, generator=generator).argsort(-1) + 1).int())
        expected = call(q, replace(batch, seq_lens_host=lengths))
        ReferenceLatentAttention(None, PLAIN).forward(expected)  # type: ignore[arg-type]
        torch.testing.assert_close(graph.run(), expected.out, rtol=0.02, atol=0.01)
