"""Paged attention for a whole batch in one piece: every query meets every key of the step, and masks do the rest.

All shapes follow from the numbers of tokens, requests and pages, rounded up, so that a recorded step serves many
batches. A page is its values [K, block, D], then, 192 bytes on, its keys in columns [K, D, block].

Axes: T tokens, padding included, N requests, W pages of each, S = N * W * block keys, H query heads, K KV heads,
G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    BuildContext,
    CacheLayout,
    CacheSpec,
    CaptureGrade,
    Region,
    StoreCall,
)

GAP = 192
"""Bytes between values and keys."""


class ColumnLayout(CacheLayout):
    """See the top of this file."""

    name = "sim_columns"
    alignment = 512

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        dtype, (heads, size) = spec["k"].dtype, spec["k"].shape
        nbytes = block_size * heads * size * dtype_of(dtype).itemsize
        values = Region("values", 0, nbytes, (heads, block_size, size), dtype)
        keys = Region("keys", nbytes + GAP, nbytes, (heads, size, block_size), dtype)
        return values, keys

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"k": views["keys"][pages].permute(0, 3, 1, 2), "v": views["values"][pages].transpose(1, 2)}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        views["keys"][pages] = planes["k"].permute(0, 2, 3, 1).to(views["keys"].dtype)
        views["values"][pages] = planes["v"].transpose(1, 2).to(views["values"].dtype)


@dataclass
class _Buffers:
    """Metadata of ``forward``, at addresses that stay for one token: pages [N, W] and a mask [T, S], True is hidden.

    ``readable`` [S] says which keys any query of the step reads.
    """

    pages: torch.Tensor
    hidden: torch.Tensor
    readable: torch.Tensor


@dataclass
class SimMetadata(AttentionMetadata):
    """A step's buffers."""

    buffers: _Buffers | None = None


class SimAttention(AttentionBackend):
    """See the top of this file."""

    layout: ClassVar[CacheLayout] = ColumnLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        self._buffers: dict[tuple[int, int, int], _Buffers] = {}

    def store(self, call: StoreCall) -> None:
        cache, slots = call.cache, call.slot_mapping.long()
        pages, offsets = slots // self.spec.block_size, slots % self.spec.block_size
        cache["keys"][pages, :, :, offsets] = call.k.to(cache["keys"].dtype)
        cache["values"][pages, :, offsets] = call.v.to(cache["values"].dtype)

    def plan(self, batch: AttentionBatch) -> SimMetadata:
        num_tokens, block = batch.slot_mapping.shape[0], self.spec.block_size
        num_requests, width = _round_up(batch.num_requests), _round_up(-(-max(batch.seq_lens_host) // block))
        token = (num_tokens, num_requests, width)
        if token not in self._buffers:
            self._buffers[token] = self._allocate(*token, batch.slot_mapping.device)
        buffers = self._buffers[token]
        visible = self._visible(batch, *token)
        readable = visible.any(0)
        # A request's table also names pages that are not its own; those become the null page, which has number 0.
        own = readable.unflatten(1, (width, block)).any(-1)
        table = batch.block_table[:, :width]
        for buffer, value in (
            (buffers.hidden, ~visible.flatten(1)),
            (buffers.readable, readable.flatten()),
            (buffers.pages, own),
        ):
            buffer.copy_(value.to(buffer.dtype).pin_memory(), non_blocking=True)
        buffers.pages[: table.shape[0], : table.shape[1]] *= table
        return SimMetadata(batch, token, buffers)

    def _visible(self, batch: AttentionBatch, num_tokens: int, num_requests: int, width: int) -> torch.Tensor:
        """Which of its request's keys each query reads, on the host: bool [T, N, W * block]."""
        keys = torch.arange(width * self.spec.block_size)
        visible = torch.zeros(num_tokens, num_requests, len(keys), dtype=torch.bool)
        for i, seq_len in enumerate(batch.seq_lens_host):
            first, last = batch.query_start_host[i : i + 2]
            queries = torch.arange(seq_len - (last - first), seq_len)
            visible[first:last, i] = ~self.spec.span.hides(queries[:, None], keys)
        return visible

    def _allocate(self, num_tokens: int, num_requests: int, width: int, device: torch.device) -> _Buffers:
        num_keys = num_requests * width * self.spec.block_size
        return _Buffers(
            pages=torch.empty(num_requests, width, dtype=torch.int64, device=device),
            hidden=torch.empty(num_tokens, num_keys, dtype=torch.bool, device=device),
            readable=torch.empty(num_keys, dtype=torch.bool, device=device),
        )

    def forward(self, call: AttentionCall) -> None:
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        assert isinstance(metadata, SimMetadata)
        assert metadata.buffers is not None
        spec, buffers = self.spec, metadata.buffers
        unread = ~buffers.readable[:, None]
        keys = cache["keys"][buffers.pages].permute(0, 1, 4, 2, 3).flatten(0, 2).float()  # [S, K, D]
        values = cache["values"][buffers.pages].transpose(2, 3).flatten(0, 2).float()
        # Nothing times NaN is NaN: what nobody reads must not even be multiplied by zero.
        keys, values = (x.masked_fill(unread[..., None], 0.0) for x in (keys, values))
        queries = q.float().unflatten(1, (spec.num_kv_heads, -1))  # [T, K, G, D]
        scores = torch.einsum("tkgd,skd->kgts", queries, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = torch.softmax(scores.masked_fill(buffers.hidden, float("-inf")), dim=-1)
        # Rows of padding hide every key; their results are NaN, and nobody may read them.
        out.copy_(torch.einsum("kgts,skd->tkgd", weights, values).flatten(1, 2))


def _round_up(count: int) -> int:
    """The next power of two: fewer shapes, so fewer recordings."""
    return 1 << (count - 1).bit_length()
