"""Latent attention over all earlier positions by FlashMLA's kernel of Hopper, for decodes and prompts.

The kernel takes requests of equally many queries, and fills tiles of 64 rows, each a query of one head. So the queries
of prompts are cut into pieces that fill a tile, and each piece is given as a request of its own.

Axes: T tokens, N requests, B pieces, Q queries of a piece, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from hardpoint.attention.latent_rows import LatentRows
from hardpoint_cuda.flash_mla_library import FLASH_MLA, LATENT_SIZE, Schedules, find, split_into_powers, tokens_per_call
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    BuildContext,
    CacheLayout,
    CaptureGrade,
    DeviceInfo,
    LatentBackend,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
    LatentWorkload,
    Reason,
)

_TILE = 64
"""BLOCK_SIZE_M of csrc/sm90/decode/dense/config.h."""


@dataclass(frozen=True)
class _Launch:
    """B pieces of Q queries each. ``rows``: the step's tokens [B * Q]; ``lengths`` [B], the last query included, and
    ``pages`` [B, blocks] are int32 on the device."""

    queries: int
    rows: slice | torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor


@dataclass
class FlashMlaMetadata(AttentionMetadata):
    """How a step is launched."""

    launches: Sequence[_Launch] = ()
    schedules: Schedules = field(default_factory=Schedules)


class FlashMlaAttention(LatentBackend):
    """See the top of this file."""

    layout: ClassVar[CacheLayout] = LatentRows()
    capture: ClassVar[CaptureGrade] = CaptureGrade.SINGLE_TOKEN
    exact_lengths: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        self._most = tokens_per_call(spec.num_heads)
        full = max(1, _TILE // spec.num_heads)
        self._piece = 1 << (full.bit_length() - 1)

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse a cache of another dtype than the queries', and a FlashMLA with other functions."""
        found = FLASH_MLA.reasons()
        if workload.kv_dtype not in (None, workload.dtype):
            message = "the cache's dtype is not the queries'"
            found.append(Reason("kv-dtype", message, wanted=workload.kv_dtype, supported=workload.dtype))
        return found

    def store(self, call: LatentStoreCall) -> None:
        """See LatentBackend."""
        store_rows(call, self.spec.block_size)

    def plan(self, batch: AttentionBatch) -> FlashMlaMetadata:
        """See StepPlanner. Lengths stay on the device: those of the host may be bounds."""
        return FlashMlaMetadata(batch, batch.num_decodes, tuple(self._launches(batch)))

    def _launches(self, batch: AttentionBatch) -> Iterator[_Launch]:
        starts, first = batch.query_start_host, batch.num_decodes
        for begin in range(0, first, self._most):
            part = slice(begin, min(first, begin + self._most))
            yield _Launch(1, part, batch.seq_lens[part], batch.block_table[part])
        counts = [b - a for a, b in pairwise(starts[first:])]
        device = batch.seq_lens.device
        for size, pieces in split_into_powers(counts, self._piece).items():
            for begin in range(0, len(pieces), max(1, self._most // size)):
                some = pieces[begin : begin + max(1, self._most // size)]
                requests = [first + request for request, _ in some]
                later = [counts[request] - offset - size for request, offset in some]
                firsts = [starts[first + request] + offset for request, offset in some]
                request, after, row = torch.tensor([requests, later, firsts]).to(device, non_blocking=True)
                yield _Launch(
                    size,
                    (row[:, None] + torch.arange(size, device=device)).flatten(),
                    (batch.seq_lens[request] - after).to(torch.int32),
                    batch.block_table[request],
                )

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend."""
        assert isinstance(call.metadata, FlashMlaMetadata)
        rows, heads = call.cache["rows"].unsqueeze(2), self.spec.num_heads
        schedules = call.metadata.schedules
        schedules.begin(self)
        for number, launch in enumerate(call.metadata.launches):
            q = torch.cat((call.q_latent[launch.rows], call.q_rope[launch.rows]), dim=-1)
            out, _ = find("flash_mla_with_kvcache")(
                q=q.view(-1, launch.queries, heads, q.shape[-1]),
                k_cache=rows,
                block_table=launch.pages,
                cache_seqlens=launch.lengths,
                head_dim_v=LATENT_SIZE,
                tile_scheduler_metadata=schedules.of(number),
                softmax_scale=self.spec.scale,
                causal=launch.queries > 1,
                is_fp8_kvcache=False,
                indices=None,
            )
            call.out[launch.rows] = out.view(-1, heads, LATENT_SIZE)


def store_rows(call: LatentStoreCall, block_size: int) -> None:
    """Write latents and rotated keys to a cache of LatentRows."""
    slots, rows = call.slot_mapping.long(), call.cache["rows"]
    row = torch.cat((call.latent, call.rope_key), dim=-1)
    rows[slots // block_size, slots % block_size] = row.to(rows.dtype)
