"""AITER's latent attention, over a cache in which each token's latent and rotated key are neighbours.

Tokens are what AITER calls pages: its kernels are given the place of each token that a request reads.

Axes: T tokens, N requests, H query heads, L latent size, R rope size, B tokens of a page, S tokens of all requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch.nn.functional import pad

from hardpoint.attention.latent_rows import LatentRows, tokens_in_place
from hardpoint.attention.phases import sub_batch
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    CacheLayout,
    DeviceInfo,
    LatentBackend,
    LatentCall,
    LatentStoreCall,
    LatentWorkload,
    Reason,
)
from hardpoint_rocm.aiter_library import function, reasons_against

_HEADS = (16, 128)


@dataclass(frozen=True)
class _Part:
    """Requests of one call: their rows among the step's, and their batch. Device arrays, int32: ``token_start`` [N+1]
    and ``page`` and ``offset`` [S] of the tokens that they read, request by request; ``last`` [N] is full of ones."""

    rows: slice
    batch: AttentionBatch
    most_queries: int
    token_start: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    last: torch.Tensor


@dataclass
class LatentMetadata(AttentionMetadata):
    """``decodes`` and ``prompts``: what each of the two kernels is given."""

    decodes: _Part | None = None
    prompts: _Part | None = None


class AiterLatentAttention(LatentBackend):
    """Decodes by ``mla_decode_fwd``, which splits long contexts, all other requests by ``mla_prefill_fwd``."""

    layout: ClassVar[CacheLayout] = LatentRows()

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse numbers of heads that not both kernels have, and an AITER that has other functions."""
        found = reasons_against("mla.mla_decode_fwd", "mla.mla_prefill_fwd")
        if workload.num_heads is not None and workload.num_heads not in _HEADS:
            message, supported = "query heads of a rank", " or ".join(map(str, _HEADS))
            found.append(Reason("num-heads", message, wanted=str(workload.num_heads), supported=supported))
        return found

    def store(self, call: LatentStoreCall) -> None:
        """See LatentBackend."""
        slots, block = call.slot_mapping.long(), self.spec.block_size
        row = torch.cat((call.latent, call.rope_key), dim=-1)
        call.cache["rows"][slots // block, slots % block] = row.to(call.cache["rows"].dtype)

    def plan(self, batch: AttentionBatch) -> LatentMetadata:
        """See StepPlanner. Nothing waits for the device: lengths are known on the host, too."""
        split, last = batch.num_decodes, batch.num_requests
        return LatentMetadata(
            batch,
            decodes=self._part(batch, 0, split) if split else None,
            prompts=self._part(batch, split, last) if split < last else None,
        )

    def _part(self, whole: AttentionBatch, first: int, last: int) -> _Part:
        batch, starts = sub_batch(whole, first, last), whole.query_start_host[first : last + 1]
        total, block, lengths = sum(batch.seq_lens_host), self.spec.block_size, batch.seq_lens
        token_start = pad(lengths.cumsum(0), (1, 0))
        request = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=total)
        position = torch.arange(total, device=lengths.device) - token_start[request]
        return _Part(
            rows=slice(starts[0], starts[-1]),
            batch=batch,
            most_queries=max(after - before for before, after in pairwise(starts)),
            token_start=token_start.to(torch.int32),
            page=batch.block_table[request, position // block],
            offset=(position % block).to(torch.int32),
            last=torch.ones_like(lengths),
        )

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend."""
        planned = call.metadata
        assert isinstance(planned, LatentMetadata)
        rows = call.cache["rows"]
        for name, part in (("mla.mla_decode_fwd", planned.decodes), ("mla.mla_prefill_fwd", planned.prompts)):
            if part is None:
                continue
            out, (tokens, places) = call.out[part.rows], _tokens_read(rows, part)
            heads_adjacent = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            function(name)(
                q=torch.cat((call.q_latent[part.rows], call.q_rope[part.rows]), dim=-1),
                kv_buffer=tokens,
                o=heads_adjacent,
                qo_indptr=part.batch.query_start,
                kv_indptr=part.token_start,
                kv_indices=places,
                kv_last_page_lens=part.last,
                max_seqlen_q=part.most_queries,
                sm_scale=self.spec.scale,
            )
            if heads_adjacent is not out:
                out.copy_(heads_adjacent)


def _tokens_read(rows: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [tokens, 1, 1, n] of the cache ``rows`` [pages, B, n], and the places (int32 [S]) of those that are read.

    Where pages are padded, as those of layers are that share memory with larger pages, no number of tokens may fit
    between two of them: then what is read is copied first.
    """
    size = rows.shape[2]
    if (found := tokens_in_place(rows)) is None:
        copied = rows[part.page.long(), part.offset.long()].view(-1, 1, 1, size)
        return copied, torch.arange(len(copied), dtype=torch.int32, device=rows.device)
    tokens, between = found
    return tokens.view(-1, 1, 1, size), part.page * between + part.offset
