"""The attention family's truth: paged attention with plain torch ops, one request at a time, in float32 or wider.

Axes: T tokens, H query heads, K KV heads, G = H / K, D head size, S keys of one request.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    CacheLayout,
    PlainLayout,
    StoreCall,
)

_MOST_SCORES = 1 << 26
"""Scores of one request that exist at a time, over all heads: they grow with queries times keys."""


class ReferenceAttention(AttentionBackend):
    """Correct for every feature and dtype; fast for none."""

    layout: CacheLayout = PlainLayout()  # type: ignore[misc]  # a class variable, as the base has it

    def store(self, call: StoreCall) -> None:
        store_kv.reference(call.k, call.v, call.cache["k"], call.cache["v"], call.slot_mapping)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch)

    def read(self, cache: dict[str, torch.Tensor], pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values on ``pages`` (int64 [n]), each [n, block, K, D]."""
        planes = self.layout.to_logical(cache, pages)
        return planes["k"], planes["v"]

    def forward(self, call: AttentionCall) -> None:
        batch = call.metadata.batch
        for i, seq_len in enumerate(batch.seq_lens_host):
            first, last = batch.query_start_host[i], batch.query_start_host[i + 1]
            pages, start = read_blocks(batch, i, self.spec)
            keys, values = (x.flatten(0, 1) for x in self.read(call.cache, pages))
            for queries, num_keys in query_parts(last - first, seq_len - start, self.spec.num_heads):
                call.out[first:last][queries] = attend(
                    call.q[first:last][queries],
                    keys[:num_keys],
                    values[:num_keys],
                    self.spec,
                    self.sinks,
                    self.alibi_slopes,
                    start,
                )


def query_parts(num_queries: int, num_keys: int, num_heads: int) -> Iterator[tuple[slice, int]]:
    """Parts of one request's newest queries, and the number of keys up to each part's last query.

    A part makes at most ``_MOST_SCORES`` scores, or has one query.
    """
    size = max(1, _MOST_SCORES // (num_heads * num_keys)) if num_keys else 1
    for first in range(0, num_queries, size):
        last = min(first + size, num_queries)
        yield slice(first, last), num_keys - num_queries + last


def read_blocks(batch: AttentionBatch, i: int, spec: AttentionSpec) -> tuple[torch.Tensor, int]:
    """The pages (int64) that request ``i``'s queries read, and the position of the first one's first token."""
    seq_len, num_queries = batch.seq_lens_host[i], batch.query_start_host[i + 1] - batch.query_start_host[i]
    first = spec.span.first(seq_len - num_queries) // spec.block_size
    pages = batch.block_table[i, first : -(-seq_len // spec.block_size)]
    return pages.long(), first * spec.block_size


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    start: int = 0,
) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762) of one request's newest queries.

    k, v [S, K, D] are those of the positions from ``start`` on; q [T, H, D] are the last T of them. Returns [T, H, D]
    in q's dtype. The order of score changes: scale, soft cap, ALiBi, mask; a sink (arXiv:2309.17453, as a learned
    logit) joins the denominator only.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = spec.num_heads // spec.num_kv_heads
    keys, values = (x.to(wide).repeat_interleave(groups, dim=1) for x in (k, v))
    products = torch.einsum("thd,shd->hts", q.to(wide), keys)
    weights = attention_weights(products, spec, sinks, alibi_slopes, start)
    return torch.einsum("hts,shd->thd", weights, values).to(q.dtype)


def attention_weights(
    products: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    start: int = 0,
) -> torch.Tensor:
    """The weights [H, T, S] of keys, from the products [H, T, S] of queries and keys; both are as in ``attend``."""
    num_queries, num_keys = products.shape[1:]
    scores = products * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    keys_at = torch.arange(start, start + num_keys, device=products.device)
    queries_at = keys_at[num_keys - num_queries :, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * (queries_at - keys_at)
    scores = scores.masked_fill(spec.span.hides(queries_at, keys_at), float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(-1, num_queries, 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
