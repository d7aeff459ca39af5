"""Sparse latent attention by FlashMLA's kernels of Hopper and Blackwell, over a cache of 16 bits and one of 8.

Over 16 bits one kernel, which the library has for prompts, serves every step: the cache's pages are its keys. Over 8
bits (``flash_mla_cache.py``) another reads the cache for decodes. For prompts that list positions more often than their
context has any, the context is made 16 bits wide once and the first kernel reads that.

Axes: T tokens, N requests, S tokens of a context, H query heads, K positions of a list, B tokens of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hardpoint.attention.latent_rows import LatentRows, tokens_in_place
from hardpoint_cuda.flash_mla import store_rows
from hardpoint_cuda.flash_mla_cache import FlashMlaRows, token_bytes
from hardpoint_cuda.flash_mla_library import (
    FLASH_MLA,
    LATENT_SIZE,
    ROW,
    PaddedQueries,
    Schedules,
    find,
    heads_refused,
    widened,
)
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
    PlatformError,
    Reason,
)

_DECODE_LIST = 64
"""Positions that a list of the decode kernel is a multiple of (TOPK_BLOCK_SIZE, B_TOPK)."""
_PREFILL_LIST = 128
"""The same of the other kernel: twice B_TOPK of sm_90, and B_TOPK of sm_100."""
_CONTEXT_TOKENS = 65536
"""Tokens of a context that there is room for in 16 bits: 75 MB."""
_TOKENS_AT_ONCE = 4096
"""Tokens of a context that are widened at a time: their float32 numbers take 8 MB, and as much again when scaled."""
_CONTEXT = "flash_mla_context"


@dataclass(kw_only=True)
class SparseMetadata(AttentionMetadata):
    """``queries``: the memory for padded queries. ``requests`` int64 [T]: the request of each token. ``wide``: rows,
    request and S of each prompt whose context is widened; ``narrow``: rows of all other tokens."""

    queries: torch.Tensor
    requests: torch.Tensor
    narrow: Sequence[slice] = ()
    wide: Sequence[tuple[slice, int, int]] = ()
    context: torch.Tensor | None = None
    schedules: Schedules = field(default_factory=Schedules)


class FlashMlaSparse(LatentBackend):
    """Over a cache of 16 bits. Nothing is planned: a recorded step serves any lengths and lists."""

    layout: ClassVar[CacheLayout] = LatentRows()
    capture: ClassVar[CaptureGrade] = CaptureGrade.SINGLE_TOKEN
    exact_lengths: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        self._queries = PaddedQueries(ctx, spec)

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse attention without lists, more heads than kernels have, and a FlashMLA with other functions."""
        found = FLASH_MLA.reasons() + heads_refused(workload.num_heads)
        if workload.top_k is None:
            found.append(Reason("index-lists", "sparse attention alone: queries without lists of positions"))
        return found

    def store(self, call: LatentStoreCall) -> None:
        """See LatentBackend."""
        store_rows(call, self.spec.block_size)

    def plan(self, batch: AttentionBatch) -> SparseMetadata:
        """See StepPlanner."""
        whole = [slice(0, batch.num_tokens)]
        return SparseMetadata(
            batch=batch,
            token=batch.num_decodes,
            queries=self._queries.memory(),
            requests=request_of_tokens(batch),
            narrow=whole,
        )

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend. Raises PlatformError for a cache whose pages are no whole tokens apart."""
        planned, indices = call.metadata, call.indices
        assert isinstance(planned, SparseMetadata)
        assert indices is not None, "a spec with top_k has lists"
        if (found := tokens_in_place(call.cache["rows"])) is None:
            raise PlatformError(
                "flash_mla_sparse: pages of the cache are no whole tokens apart, since a layer of another kind shares "
                "them; deny attention.latent=flash_mla_sparse"
            )
        tokens, between = found
        slots = self._slots(indices, planned, between)
        for rows in planned.narrow:
            self._attend(call, planned, rows, tokens, widened(slots[rows], _PREFILL_LIST))

    def _slots(self, indices: torch.Tensor, planned: SparseMetadata, between: int) -> torch.Tensor:
        """Where the positions of lists [T, K] are in the cache: page * ``between`` + place in the page; -1 stays."""
        block, tokens = self.spec.block_size, planned.batch.num_tokens
        positions = indices[:tokens].clamp(min=0)
        pages = planned.batch.block_table[planned.requests].gather(1, (positions // block).long())
        return torch.where(indices[:tokens] < 0, -1, pages * between + positions % block).to(torch.int32)

    def _attend(
        self, call: LatentCall, planned: SparseMetadata, rows: slice, tokens: torch.Tensor, lists: torch.Tensor
    ) -> None:
        """Attend from the queries of ``rows`` to ``tokens`` [S, 576], of which ``lists`` int32 [rows, K] are read."""
        for part, q in self._padded(call, planned, rows):
            of_part = slice(part.start - rows.start, part.stop - rows.start)
            out, *_ = find("flash_mla_sparse_fwd")(
                q=q,
                kv=tokens.unsqueeze(1),
                indices=lists[of_part].unsqueeze(1),
                sm_scale=self.spec.scale,
                d_v=LATENT_SIZE,
            )
            call.out[part] = out[:, : self.spec.num_heads]

    def _padded(self, call: LatentCall, planned: SparseMetadata, rows: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """Parts of ``rows`` that a call takes, and their padded queries, valid until the next."""
        for begin in range(rows.start, rows.stop, self._queries.tokens):
            part = slice(begin, min(rows.stop, begin + self._queries.tokens))
            yield part, self._queries.fill(planned.queries, call.q_latent[part], call.q_rope[part])


class FlashMlaSparse8Bit(FlashMlaSparse):
    """Over the library's cache of 8 bits."""

    layout: ClassVar[CacheLayout] = FlashMlaRows()

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        ctx.resources.declare(_CONTEXT, _CONTEXT_TOKENS * ROW * 2, scope="step")

    def store(self, call: LatentStoreCall) -> None:
        """See LatentBackend."""
        slots, block = call.slot_mapping.long(), self.spec.block_size
        call.cache["rows"][slots // block, slots % block] = token_bytes(call.latent, call.rope_key)

    def plan(self, batch: AttentionBatch) -> SparseMetadata:
        """See StepPlanner. A context is widened where that reads fewer tokens of it than lists do."""
        starts, first, top_k = batch.query_start_host, batch.num_decodes, self.spec.top_k
        assert top_k is not None, "supports refuses attention without lists"
        narrow, wide = [slice(0, first)] if first else [], []
        for request in range(first, batch.num_requests):
            rows, length = slice(starts[request], starts[request + 1]), batch.seq_lens_host[request]
            if length <= min(_CONTEXT_TOKENS, (rows.stop - rows.start) * top_k):
                wide.append((rows, request, length))
            elif narrow and narrow[-1].stop == rows.start:
                narrow[-1] = slice(narrow[-1].start, rows.stop)
            else:
                narrow.append(rows)
        context = self.ctx.resources.get(_CONTEXT).view(torch.bfloat16).view(_CONTEXT_TOKENS, ROW) if wide else None
        return SparseMetadata(
            batch=batch,
            token=first,
            queries=self._queries.memory(),
            requests=request_of_tokens(batch),
            narrow=narrow,
            wide=wide,
            context=context,
        )

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend."""
        planned, indices, cache = call.metadata, call.indices, call.cache["rows"]
        assert isinstance(planned, SparseMetadata)
        assert indices is not None, "a spec with top_k has lists"
        if planned.narrow:
            slots = widened(self._slots(indices, planned, self.spec.block_size), _DECODE_LIST)
            planned.schedules.begin(self)
            for rows in planned.narrow:
                self._decode(call, planned, rows, cache.unsqueeze(2), slots)
        for rows, request, length in planned.wide:
            context = self._widened(call, planned, request, length)
            self._attend(call, planned, rows, context, widened(indices[rows], _PREFILL_LIST))

    def _decode(
        self, call: LatentCall, planned: SparseMetadata, rows: slice, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Each token is a request of its own. Calls of equally many tokens share the library's metadata."""
        for part, q in self._padded(call, planned, rows):
            out, _ = find("flash_mla_with_kvcache")(
                q=q.unsqueeze(1),
                k_cache=cache,
                block_table=None,
                cache_seqlens=None,
                head_dim_v=LATENT_SIZE,
                tile_scheduler_metadata=planned.schedules.of(len(q)),
                softmax_scale=self.spec.scale,
                causal=False,
                is_fp8_kvcache=True,
                indices=slots[part].unsqueeze(1),
            )
            call.out[part] = out[:, 0, : self.spec.num_heads]

    def _widened(self, call: LatentCall, planned: SparseMetadata, request: int, length: int) -> torch.Tensor:
        """The context of a request in 16 bits [S, 576], widened some pages at a time."""
        assert planned.context is not None
        block, context = self.spec.block_size, planned.context[:length]
        pages = planned.batch.block_table[request, : -(-length // block)].long()
        at_once = _TOKENS_AT_ONCE // block
        for some, rows in zip(pages.split(at_once), context.split(at_once * block), strict=True):
            planes = self.layout.to_logical(call.cache, some)
            rows[:, :LATENT_SIZE] = planes["latent"].flatten(0, 1)[: len(rows)]
            rows[:, LATENT_SIZE:] = planes["rope_key"].flatten(0, 1)[: len(rows)]
        return context


def request_of_tokens(batch: AttentionBatch) -> torch.Tensor:
    """The request of each token, int64 [T], computed on the device."""
    counts = batch.query_start.diff()
    requests = torch.arange(len(counts), device=counts.device)
    return requests.repeat_interleave(counts, output_size=batch.num_tokens)
