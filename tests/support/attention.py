"""Attention backends on made-up batches: ragged, chunked and mixed, over a cache full of garbage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from hardpoint.resources import EngineResources
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionSpec,
    BuildContext,
    ConfigValue,
    DeviceInfo,
    StoreCall,
)


@dataclass(frozen=True)
class Piece:
    """One request of a batch: ``query`` new tokens at the end of ``total``."""

    query: int
    total: int


MIXED = (Piece(1, 1), Piece(1, 37), Piece(1, 16), Piece(1, 5), Piece(9, 9), Piece(16, 48), Piece(3, 50))
"""Decodes first, among them a request's very first token and a full page; then a whole prompt and two chunks."""


ANY_DEVICE = DeviceInfo("cpu", "any", "cpu", "any")


@dataclass(frozen=True)
class PluginConfigOnly:
    """As much of a build context as backends ask for outside an engine: settings, scratch memory, a device."""

    sections: Mapping[str, Mapping[str, ConfigValue]]
    resources: EngineResources = field(default_factory=EngineResources)
    device: DeviceInfo = ANY_DEVICE
    tuning_folders: Sequence[Path] = ()

    def plugin_config(self, plugin: str) -> Mapping[str, ConfigValue]:
        return self.sections[plugin]


def run_backend(
    backend_class: type[AttentionBackend],
    spec: AttentionSpec,
    pieces: Sequence[Piece],
    seed: int = 0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    plugin_config: Mapping[str, Mapping[str, ConfigValue]] | None = None,
    device: torch.device | str = "cpu",
    value_size: int | None = None,
    ctx: PluginConfigOnly | None = None,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Run one step over ``pieces``, whose earlier tokens were stored in earlier steps, on permuted pages.

    The cache and the output are poisoned with NaN first. ``value_size`` is that of heads' results, unless it is their
    own; ``ctx`` takes the place of one with ``plugin_config``. Returns the output [T, H, D] and each request's
    (queries, all keys, all values), all on the host.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, spec.head_size, generator=generator).to(dtype)

    ctx = ctx or PluginConfigOnly(plugin_config or {})
    backend = backend_class(cast(BuildContext, ctx), spec)
    ctx.resources.allocate(torch.device(device))
    backend.set_head_constants(sinks, alibi_slopes)
    widths = [-(-piece.total // spec.block_size) for piece in pieces]
    pages = sum(widths) + 1
    size = backend.layout.page_bytes(backend.cache_spec, spec.block_size)
    buffer = torch.full((pages * size,), 0xFF, dtype=torch.uint8, device=device)
    buffer[:size].zero_()
    cache = backend.layout.views(buffer, pages, backend.cache_spec, spec.block_size)
    ids = (torch.randperm(pages - 1, generator=generator) + 1).to(torch.int32)
    table = torch.zeros(len(pieces), max(widths), dtype=torch.int32)
    start = 0
    for row, width in zip(table, widths, strict=True):
        row[:width] = ids[start : start + width]
        start += width

    def slots(i: int, first: int, last: int) -> torch.Tensor:
        position = torch.arange(first, last)
        return (table[i, position // spec.block_size] * spec.block_size + position % spec.block_size).to(torch.int32)

    requests = []
    for i, piece in enumerate(pieces):
        k, v = draw(piece.total, spec.num_kv_heads), draw(piece.total, spec.num_kv_heads)
        old = piece.total - piece.query
        backend.store(StoreCall(k[:old].to(device), v[:old].to(device), cache, slots(i, 0, old).to(device)))
        requests.append((draw(piece.query, spec.num_heads), k, v))
    starts = torch.tensor([0, *(piece.query for piece in pieces)]).cumsum(0).to(torch.int32)
    totals = torch.tensor([piece.total for piece in pieces], dtype=torch.int32)
    batch = AttentionBatch(
        query_start=starts.to(device),
        seq_lens=totals.to(device),
        block_table=table.to(device),
        slot_mapping=torch.cat([slots(i, p.total - p.query, p.total) for i, p in enumerate(pieces)]).to(device),
        query_start_host=tuple(starts.tolist()),
        seq_lens_host=tuple(totals.tolist()),
        num_decodes=sum(piece.query == 1 for piece in pieces),
    )
    q = torch.cat([q for q, _, _ in requests]).to(device)
    k, v = (torch.cat([r[j][r[1].shape[0] - r[0].shape[0] :] for r in requests]).to(device) for j in (1, 2))
    backend.store(StoreCall(k, v, cache, batch.slot_mapping))
    out = torch.full_like(q[..., : value_size or spec.head_size], float("nan"))
    before = [x.clone() for x in (q, k, v)]
    backend.forward(AttentionCall(q, k, v, cache, backend.plan(batch), out))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True)), "inputs were written to"
    return out.cpu(), requests


def brute_force(
    spec: AttentionSpec,
    requests: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, one query and one head at a time, in float64; shares no code with any backend."""
    rows = []
    for q, k, v in requests:
        first = k.shape[0] - q.shape[0]
        for t, h in ((t, h) for t in range(q.shape[0]) for h in range(spec.num_heads)):
            position, kv_head = first + t, h * spec.num_kv_heads // spec.num_heads
            oldest = 0 if spec.window is None else max(0, position - spec.window + 1)
            if spec.chunk is not None:
                oldest = position // spec.chunk * spec.chunk
            visible = torch.arange(oldest, position + 1)
            scores = (k[visible, kv_head].double() @ q[t, h].double()) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            if alibi_slopes is not None:
                scores = scores + alibi_slopes[h].double() * (visible - position)
            weights = scores.exp()
            total = weights.sum() + (sinks[h].double().exp() if sinks is not None else 0.0)
            rows.append((weights / total) @ v[visible, kv_head].double())
    return torch.stack(rows).view(-1, spec.num_heads, spec.head_size)
