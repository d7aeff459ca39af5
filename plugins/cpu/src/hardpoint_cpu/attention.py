"""Paged attention on CPU through torch's fused scaled_dot_product_attention, over the plain cache layout.

Keys and values are gathered from their pages first; decodes of similar length go through one call. Additive terms
(window, chunk, ALiBi, sinks) travel in the mask; only a soft cap needs the unfused path.

Axes: T query tokens, H query heads, K KV heads, D head size, S keys of one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from hardpoint.ops.store_kv import store_kv
from hardpoint.reference.attention import attend, read_blocks
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    CacheLayout,
    PlainLayout,
    StoreCall,
)

MAX_PADDING = 2.0
"""Decodes are batched while the padded keys are at most this many times the real ones."""


@dataclass
class _Request:
    """One request of a step: its rows of the query, and its keys: on ``pages`` (int64), positions from ``start`` on."""

    rows: slice
    seq_len: int
    pages: torch.Tensor
    start: int


@dataclass
class CpuMetadata(AttentionMetadata):
    """A step as this backend runs it: decodes in one call (``pages``, ``offsets``, ``hidden``), the rest one by one."""

    singles: tuple[_Request, ...] = ()
    num_batched: int = 0
    pages: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


class CpuAttention(AttentionBackend):
    """See the top of this file."""

    layout: ClassVar[CacheLayout] = PlainLayout()

    def store(self, call: StoreCall) -> None:
        store_kv.reference(call.k, call.v, call.cache["k"], call.cache["v"], call.slot_mapping)

    def plan(self, batch: AttentionBatch) -> CpuMetadata:
        lengths = batch.seq_lens_host
        decodes = lengths[: batch.num_decodes]
        batched = len(decodes) > 1 and len(decodes) * max(decodes) <= MAX_PADDING * sum(decodes)
        first = len(decodes) if batched else 0
        singles = tuple(self._request(batch, i) for i in range(first, len(lengths)))
        if not batched:
            return CpuMetadata(batch, singles=singles)
        position = torch.arange(max(decodes))
        ends = batch.seq_lens[:first, None]
        hidden = self.spec.span.hides(ends - 1, position)
        read = torch.where(hidden, ends - 1, position)
        pages = batch.block_table[:first].long().gather(1, read // self.spec.block_size)
        offsets = read % self.spec.block_size
        return CpuMetadata(batch, None, singles, first, pages, offsets, hidden)

    def _request(self, batch: AttentionBatch, i: int) -> _Request:
        rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
        return _Request(rows, batch.seq_lens_host[i], *read_blocks(batch, i, self.spec))

    def forward(self, call: AttentionCall) -> None:
        q, k, v, cache, metadata, out = call.q, call.k, call.v, call.cache, call.metadata, call.out
        assert isinstance(metadata, CpuMetadata)
        if metadata.num_batched:
            self._decode(q, cache, metadata, out)
        for request in metadata.singles:
            rows, length = request.rows, request.seq_len
            if rows.stop - rows.start == length:  # the whole request is in this step: no need to read it back
                keys, values, start = k[rows], v[rows], 0
            else:
                start, end = request.start, length - request.start
                keys, values = (cache[name][request.pages].flatten(0, 1)[:end].to(q.dtype) for name in ("k", "v"))
            out[rows] = self._attend(q[rows], keys, values, start)

    def _decode(
        self, q: torch.Tensor, cache: dict[str, torch.Tensor], metadata: CpuMetadata, out: torch.Tensor
    ) -> None:
        """One query per request, all requests in one call. A hidden key's place is taken by the request's newest."""
        count, pages, offsets, hidden = metadata.num_batched, metadata.pages, metadata.offsets, metadata.hidden
        assert pages is not None
        assert offsets is not None
        assert hidden is not None
        keys, values = (cache[name][pages, offsets].to(q.dtype) for name in ("k", "v"))
        if self.spec.soft_cap is not None:
            for i, length in enumerate(metadata.batch.seq_lens_host[:count]):
                start = self.spec.span.first(length - 1)
                out[i : i + 1] = self._attend(q[i : i + 1], keys[i, start:length], values[i, start:length], start)
            return
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
        if self.alibi_slopes is not None:
            distance = metadata.batch.seq_lens[:count, None] - 1 - torch.arange(hidden.shape[1])
            bias = bias - self.alibi_slopes[:, None, None] * distance[:, None, None]
        out[:count] = self._fused(q[:count, :, None], keys.transpose(1, 2), values.transpose(1, 2), bias)[:, :, 0]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        """q [T, H, D], k, v [S, K, D] of one request, from position ``start`` on -> [T, H, D]."""
        if self.spec.soft_cap is not None:
            return attend(q, k, v, self.spec, self.sinks, self.alibi_slopes, start)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        return self._fused(queries, keys, values, self._bias(q.shape[0], k.shape[0], start))[0].transpose(0, 1)

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """q [N, H, T, D], k, v [N, K, S, D]; ``bias`` broadcasts to [N, H, T, S], None means plainly causal."""
        if self.sinks is not None:
            # A sink is a key that scores a constant and carries no value: one more column of the mask.
            column = self.sinks.float().view(1, -1, 1, 1)
            assert bias is not None
            batch, heads, queries = q.shape[:3]
            bias = torch.cat([bias.expand(batch, heads, queries, -1), column.expand(batch, -1, queries, 1)], dim=-1)
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            is_causal=bias is None and q.shape[2] > 1,
            scale=self.spec.scale,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
        )

    def _bias(self, queries: int, keys: int, start: int) -> torch.Tensor | None:
        """The bias on one request's scores, float32 [T, S] or [H, T, S]; None where there is only the causal mask."""
        all_read = self.spec.span.first(start + keys - 1) <= start
        plain = all_read and self.alibi_slopes is None and self.sinks is None
        if plain and queries in (1, keys):
            return None
        keys_at = torch.arange(start, start + keys)
        queries_at = keys_at[keys - queries :, None]
        bias = torch.zeros(queries, keys)
        if self.alibi_slopes is not None:
            bias = -self.alibi_slopes[:, None, None] * (queries_at - keys_at)
        return bias.masked_fill(self.spec.span.hides(queries_at, keys_at), float("-inf"))
