"""Which form latent attention takes for each request of a step, and what the unabsorbed form reads from the cache.

In the absorbed form, queries are multiplied by the keys' matrix, and attend to latents. In the unabsorbed form, latents
are multiplied by the matrices of keys and values, and queries attend to the keys and values of their heads. A pair of a
query and a key costs less then, but each key costs two products, also keys of earlier steps.

Axes: T tokens, N requests, H query heads, L latent size, R rope size, S tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

import torch

from hardpoint.attention.phases import sub_batch
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    CacheLayout,
    CaptureGrade,
    LatentBackend,
    MLAArgs,
    Phase,
    StepLimits,
    StepPlanner,
)

_MOST_CHUNK_BYTES = 128 << 20
"""Bytes of the keys and values of a chunk, about."""
_MARGIN = 0.8
"""The unabsorbed form is taken where it costs at most this share of the absorbed form's multiplications. It also copies
keys and values, and merges results; see docs/measurements/cpu.md."""


@dataclass(frozen=True)
class Ragged:
    """Where requests begin among tokens that lie one after the other: int32 [N + 1], and the same on the host."""

    start: torch.Tensor
    starts: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Ragged:
        """Requests of so many tokens."""
        starts = (0, *accumulate(counts))
        return cls(torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True), starts)


@dataclass(frozen=True)
class ContextChunk:
    """Cached tokens of consecutive requests. ``rows``: the queries of these requests, among those of the prompts.

    ``pages`` int64 [P] hold the tokens; ``kept`` int64 [S] are the tokens' places among those of the pages, or None
    where they are the first S.
    """

    rows: slice
    queries: Ragged
    keys: Ragged
    pages: torch.Tensor
    kept: torch.Tensor | None

    def read(
        self, layout: CacheLayout, cache: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk's latents [S, L] and rotated keys [S, R]."""
        planes = layout.to_logical(cache, self.pages)
        latent, rope_key = (planes[name].flatten(0, 1) for name in ("latent", "rope_key"))
        kept = slice(self.keys.starts[-1]) if self.kept is None else self.kept
        return latent[kept].to(dtype), rope_key[kept].to(dtype)


@dataclass(frozen=True)
class Prompts:
    """Consecutive requests that take the unabsorbed form. ``rows``: their tokens in the step."""

    rows: slice
    tokens: Ragged
    context: tuple[ContextChunk, ...]


@dataclass
class FormsMetadata(AttentionMetadata):
    """A step by forms: the backend's metadata of the absorbed ``rows``, or None, and prompts in the unabsorbed form."""

    absorbed: AttentionMetadata | None = None
    rows: slice | torch.Tensor = field(default_factory=lambda: slice(None))
    prompts: Sequence[Prompts] = ()


class LatentForms(StepPlanner):
    """Plans the steps of a backend and of the unabsorbed form.

    Requests with several queries take the unabsorbed form where that costs fewer multiplications. Captured steps, whose
    lengths are not known on the host, are absorbed; so are requests that read earlier tokens in a step whose lengths
    are bounds.
    """

    def __init__(self, backend: LatentBackend, args: MLAArgs, num_heads: int, most_tokens: int, itemsize: int) -> None:
        """A chunk of context has at most ``most_tokens`` tokens; ``itemsize`` bytes are those of a number."""
        self.backend, self._block = backend, backend.spec.block_size
        self._key_pair = 2 * args.latent_size + args.rope_size
        self._head_pair = args.nope_size + args.rope_size + args.value_size
        self._per_token = args.latent_size * (args.nope_size + args.value_size)
        key_bytes = num_heads * itemsize * (self._head_pair + args.nope_size + args.value_size)
        tokens = min(most_tokens, _MOST_CHUNK_BYTES // max(1, key_bytes))
        self.chunk_tokens = max(1, tokens // self._block) * self._block

    @property
    def capture(self) -> CaptureGrade:  # type: ignore[override]  # the backend's, which a switch may change
        return self.backend.capture

    @property
    def exact_lengths(self) -> bool:  # type: ignore[override]  # as well
        return self.backend.exact_lengths

    def grade(self, phase: Phase, tokens: int) -> CaptureGrade:
        return self.backend.grade(phase, tokens)

    def step_limits(self) -> StepLimits:
        return self.backend.step_limits()

    def is_unabsorbed(self, queries: int, total: int) -> bool:
        """Whether the newest ``queries`` of ``total`` tokens cost clearly fewer multiplications in the unabsorbed form.

        Both forms multiply once for each query or key by the matrices of keys and values, and for each pair.
        """
        pairs = queries * (total - queries) + queries * (queries + 1) // 2
        absorbed = pairs * self._key_pair + queries * self._per_token
        return pairs * self._head_pair + total * self._per_token < _MARGIN * absorbed

    def plan(self, batch: AttentionBatch) -> FormsMetadata:
        starts, lengths, first = batch.query_start_host, batch.seq_lens_host, batch.num_decodes
        forms = [False] * first
        for i in range(first, batch.num_requests):
            queries = starts[i + 1] - starts[i]
            known = batch.exact_lengths or queries == lengths[i]
            forms.append(known and self.is_unabsorbed(queries, lengths[i]))
        if batch.graph_key is not None or True not in forms:
            whole = self.backend.plan(batch)
            return FormsMetadata(batch, whole.token, whole)
        prompts, end = [], 0
        for unabsorbed, run in groupby(forms):
            begin, end = end, end + len(list(run))
            if unabsorbed:
                prompts.append(self._prompts(batch, slice(starts[begin], starts[end]), begin, end))
        absorbed = [i for i, unabsorbed in enumerate(forms) if not unabsorbed]
        if not absorbed:
            return FormsMetadata(batch, prompts=prompts)
        rows, part = _selected(batch, absorbed)
        # One plan for all of them: it is valid until the backend's next one.
        return FormsMetadata(batch, None, self.backend.plan(part), rows, prompts)

    def _prompts(self, batch: AttentionBatch, rows: slice, first: int, last: int) -> Prompts:
        """Requests ``first`` to ``last`` (exclusive), whose tokens are ``rows``."""
        starts, device = batch.query_start_host, batch.query_start.device
        counts = [starts[i + 1] - starts[i] for i in range(first, last)]
        earlier = [batch.seq_lens_host[first + i] - count for i, count in enumerate(counts)]
        tokens = Ragged.of(counts, device)
        chunks = []
        for pieces in _chunks(earlier, self.chunk_tokens, self._block):
            i, j = pieces[0][0], pieces[-1][0] + 1
            keys = [0] * (j - i)
            pages, places, num_pages = [], [], 0
            for request, begin, end in pieces:
                keys[request - i] += end - begin
                pages.append(batch.block_table[first + request, begin // self._block : -(-end // self._block)])
                places.append(torch.arange(end - begin) + num_pages * self._block)
                num_pages += len(pages[-1])
            kept = torch.cat(places)
            dense = len(kept) == int(kept[-1]) + 1
            chunks.append(
                ContextChunk(
                    slice(tokens.starts[i], tokens.starts[j]),
                    Ragged.of(counts[i:j], device),
                    Ragged.of(keys, device),
                    torch.cat(pages).long(),
                    None if dense else kept.to(device, non_blocking=True),
                )
            )
        return Prompts(rows, tokens, tuple(chunks))


class UnabsorbedForms(LatentForms):
    """The unabsorbed form wherever it may be taken, whatever it costs."""

    def is_unabsorbed(self, queries: int, total: int) -> bool:
        return True


def _selected(batch: AttentionBatch, requests: Sequence[int]) -> tuple[slice | torch.Tensor, AttentionBatch]:
    """Some ``requests`` of an eager batch, all its decodes among them, as a batch of their own, and their rows.

    Rows are int64 indices where these requests are not the batch's first.
    """
    starts, count, device = batch.query_start_host, len(requests), batch.query_start.device
    if requests[-1] == count - 1:
        return slice(0, starts[count]), sub_batch(batch, 0, count)
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in requests]).to(device, non_blocking=True)
    chosen = torch.tensor(requests).to(device, non_blocking=True)
    tokens = Ragged.of([starts[i + 1] - starts[i] for i in requests], device)
    return rows, replace(
        batch,
        query_start=tokens.start,
        seq_lens=batch.seq_lens[chosen],
        block_table=batch.block_table[chosen],
        slot_mapping=batch.slot_mapping[rows],
        query_start_host=tokens.starts,
        seq_lens_host=tuple(batch.seq_lens_host[i] for i in requests),
    )


def _chunks(earlier: Sequence[int], most: int, block: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut the earlier tokens of requests into chunks of at most ``most``, a multiple of the ``block`` tokens of a page.

    A chunk is a list of (request, first position, last position + 1). Every piece begins at the edge of a page, and its
    last page counts whole.
    """
    pieces, free = list[tuple[int, int, int]](), most
    for request, length in enumerate(earlier):
        begin = 0
        while begin < length:
            end = min(length, begin + free)
            pieces.append((request, begin, end))
            free -= -(-(end - begin) // block) * block
            begin = end
            if not free:
                yield pieces
                pieces, free = [], most
    if pieces:
        yield pieces
