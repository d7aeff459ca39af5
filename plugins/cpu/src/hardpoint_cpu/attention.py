"""Paged attention on CPU through torch's fused scaled_dot_product_attention, over the plain cache layout.

Keys and values are gathered from their pages first; decodes of similar length go through one call. Additive terms
(window, ALiBi, sinks) travel in the mask; only a soft cap needs the unfused path.

Axes: T query tokens, H query heads, K KV heads, D head size, S keys of one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from hardpoint.attention.reference import PlainLayout, attend
from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import NULL_PAGE, AttentionBackend, AttentionBatch, AttentionMetadata, CacheLayout

MAX_PADDING = 2.0
"""Decodes are batched while the padded keys are at most this many times the real ones."""


@dataclass
class _Request:
    """One request of a step: its rows of the query, and its pages, int64."""

    rows: slice
    seq_len: int
    pages: torch.Tensor


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

    def store(
        self, k: torch.Tensor, v: torch.Tensor, cache: dict[str, torch.Tensor], slot_mapping: torch.Tensor
    ) -> None:
        store_kv.reference(k, v, cache["k"], cache["v"], slot_mapping)

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
        hidden = position >= ends
        if self.spec.window is not None:
            hidden |= position < ends - self.spec.window
        pages = batch.block_table[:first].long()[:, position // self.spec.block_size].masked_fill(hidden, NULL_PAGE)
        offsets = (position % self.spec.block_size).expand_as(pages)
        return CpuMetadata(batch, None, singles, first, pages, offsets, hidden)

    def _request(self, batch: AttentionBatch, i: int) -> _Request:
        seq_len = batch.seq_lens_host[i]
        pages = batch.block_table[i, : -(-seq_len // self.spec.block_size)].long()
        return _Request(slice(batch.query_start_host[i], batch.query_start_host[i + 1]), seq_len, pages)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: dict[str, torch.Tensor],
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(metadata, CpuMetadata)
        if metadata.num_batched:
            self._decode(q, cache, metadata, out)
        for request in metadata.singles:
            rows, length = request.rows, request.seq_len
            if rows.stop - rows.start == length:  # the whole request is in this step: no need to read it back
                keys, values = k[rows], v[rows]
            else:
                keys, values = (cache[name][request.pages].flatten(0, 1)[:length].to(q.dtype) for name in ("k", "v"))
            out[rows] = self._attend(q[rows], keys, values)

    def _decode(
        self, q: torch.Tensor, cache: dict[str, torch.Tensor], metadata: CpuMetadata, out: torch.Tensor
    ) -> None:
        """One query per request, all requests in one call; keys past a request's end are read from the null page."""
        count, pages, offsets, hidden = metadata.num_batched, metadata.pages, metadata.offsets, metadata.hidden
        assert pages is not None
        assert offsets is not None
        assert hidden is not None
        keys, values = (cache[name][pages, offsets].to(q.dtype) for name in ("k", "v"))
        if self.spec.soft_cap is not None:
            for i, length in enumerate(metadata.batch.seq_lens_host[:count]):
                out[i : i + 1] = self._attend(q[i : i + 1], keys[i, :length], values[i, :length])
            return
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
        if self.alibi_slopes is not None:
            distance = metadata.batch.seq_lens[:count, None] - 1 - torch.arange(hidden.shape[1])
            bias = bias - self.alibi_slopes[:, None, None] * distance[:, None, None]
        out[:count] = self._fused(q[:count, :, None], keys.transpose(1, 2), values.transpose(1, 2), bias)[:, :, 0]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k, v [S, K, D] of one request -> [T, H, D]."""
        if self.spec.soft_cap is not None:
            return attend(q, k, v, self.spec, self.sinks, self.alibi_slopes)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        return self._fused(queries, keys, values, self._bias(q.shape[0], k.shape[0]))[0].transpose(0, 1)

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

    def _bias(self, queries: int, keys: int) -> torch.Tensor | None:
        """What is added to one request's scores, float32 [T, S] or [H, T, S]; None where causality is all there is."""
        window = self.spec.window
        windowed = window is not None and keys > window
        plain = not windowed and self.alibi_slopes is None and self.sinks is None
        if plain and queries in (1, keys):
            return None
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        bias = torch.zeros(hidden.shape)
        if self.alibi_slopes is not None:
            bias = -self.alibi_slopes[:, None, None] * distance
        return bias.masked_fill(hidden, float("-inf"))
