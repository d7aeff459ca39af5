"""The batch-invariant backend: chunks, neighbours, pages and what is beside its keys change no bit of an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import pytest
import torch

from hardpoint.layers.attention import alibi_slopes
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.batch_invariant_attention import BatchInvariantAttention
from hardpoint_plugin_api import AttentionBackend, AttentionBatch, AttentionCall, AttentionSpec, BuildContext, StoreCall
from tests.attention.test_backends import SPEC, VARIATIONS

LENGTH = 75
CUTS = {
    "whole": (0, 75),
    "token-by-token": tuple(range(76)),
    "chunks-of-8": (*range(0, 75, 8), 75),
    "chunks-of-33": (0, 33, 66, 75),
    "ragged": (0, 1, 2, 17, 18, 48, 75),
}


@dataclass(frozen=True)
class Request:
    """q [T, H, D] are the newest of the positions of k, v [S, K, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def drawn(spec: AttentionSpec, queries: int, length: int, generator: torch.Generator) -> Request:
    """A random request."""
    dtype = getattr(torch, spec.dtype)
    q, k, v = (
        torch.randn(tokens, heads, spec.head_size, generator=generator).to(dtype)
        for tokens, heads in ((queries, spec.num_heads), (length, spec.num_kv_heads), (length, spec.num_kv_heads))
    )
    return Request(q, k, v)


def step(backend: AttentionBackend, requests: Sequence[Request], generator: torch.Generator) -> list[torch.Tensor]:
    """Outputs of one step over ``requests``, decodes first, on permuted pages.

    Positions that no query reads are NaN: pages that the span has left behind, and the rest of the last one.
    """
    spec, block = backend.spec, backend.spec.block_size
    widths = [-(-r.k.shape[0] // block) for r in requests]
    size = backend.layout.page_bytes(backend.cache_spec, block)
    buffer = torch.full(((sum(widths) + 1) * size,), 0xFF, dtype=torch.uint8)
    cache = backend.layout.views(buffer, sum(widths) + 1, backend.cache_spec, block)
    table = torch.zeros(len(requests), max(widths) + 2, dtype=torch.int32)
    pages, slots = (torch.randperm(sum(widths), generator=generator) + 1).int().split(widths), []
    for row, own, request in zip(table, pages, requests, strict=True):
        row[: own.shape[0]] = own
        length, count = request.k.shape[0], request.q.shape[0]
        read = spec.span.first(length - count) // block * block
        position = torch.arange(length)
        slot = (own[position // block] * block + position % block).int()
        backend.store(StoreCall(request.k[read:], request.v[read:], cache, slot[read:]))
        slots.append(slot[length - count :])
    counts, lengths = [r.q.shape[0] for r in requests], [r.k.shape[0] for r in requests]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    batch = AttentionBatch(
        query_start=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        query_start_host=tuple(starts.tolist()),
        seq_lens_host=tuple(lengths),
        num_decodes=sum(count == 1 for count in counts),
    )
    q = torch.cat([r.q for r in requests])
    k, v = (torch.cat([x[-len(r.q) :] for r, x in zip(requests, xs, strict=True)]) for xs in
            ([r.k for r in requests], [r.v for r in requests]))  # fmt: skip
    out = torch.full_like(q, float("nan"))
    backend.forward(AttentionCall(q, k, v, cache, backend.plan(batch), out))
    return list(out.split(counts))


def built(backend_class: type[AttentionBackend], spec: AttentionSpec) -> AttentionBackend:
    """A backend with its head constants."""
    backend = backend_class(cast(BuildContext, None), spec)
    sinks = torch.linspace(-1, 2, spec.num_heads) if spec.sinks else None
    backend.set_head_constants(sinks, alibi_slopes(spec.num_heads, torch.device("cpu")) if spec.alibi else None)
    return backend


def in_chunks(backend: AttentionBackend, request: Request, cuts: Sequence[int], neighbours: int) -> torch.Tensor:
    """The outputs of all of a request's queries, read in chunks, each in a step with random others."""
    spec, generator = backend.spec, torch.Generator().manual_seed(len(cuts) + neighbours)
    chunks = []
    for start, end in pairwise(cuts):
        own = Request(request.q[start:end], request.k[:end], request.v[:end])
        others = [drawn(spec, 1 + i % 3 * 5, 12 + 29 * i, generator) for i in range(neighbours)]
        ordered = sorted([*others[::2], own, *others[1::2]], key=lambda r: r.q.shape[0] > 1)
        (place,) = (i for i, r in enumerate(ordered) if r is own)
        chunks.append(step(backend, ordered, generator)[place])
    return torch.cat(chunks)


LOWER = {
    f"{name}-bfloat16": replace(VARIATIONS[name], dtype="bfloat16", kv_dtype="bfloat16") for name in ("mha", "window")
}
SPECS = VARIATIONS | LOWER


@pytest.mark.parametrize("variation", SPECS)
def test_a_query_has_the_same_bits_in_every_step(variation: str) -> None:
    spec = SPECS[variation]
    backend = built(BatchInvariantAttention, spec)
    request = drawn(spec, LENGTH, LENGTH, torch.Generator().manual_seed(1))
    expected = in_chunks(backend, request, CUTS["whole"], neighbours=0)
    assert expected.isfinite().all()
    for name, cuts in CUTS.items():
        for neighbours in (0, 3):
            assert torch.equal(in_chunks(backend, request, cuts, neighbours), expected), (name, neighbours)


def test_this_test_finds_a_query_whose_bits_depend_on_its_chunk() -> None:
    """Planted: a backend that scales its scores by a hair's breadth where a step has one query alone."""

    class Planted(ReferenceAttention):
        def forward(self, call: AttentionCall) -> None:
            super().forward(call)
            for first, last in pairwise(call.metadata.batch.query_start_host):
                if last - first == 1:
                    call.out[first] = call.out[first].nextafter(call.out[first] + 1)

    request = drawn(SPEC, LENGTH, LENGTH, torch.Generator().manual_seed(1))
    backend = built(Planted, SPEC)
    expected = in_chunks(backend, request, CUTS["whole"], neighbours=0)
    assert not torch.equal(in_chunks(backend, request, CUTS["token-by-token"], neighbours=0), expected)
