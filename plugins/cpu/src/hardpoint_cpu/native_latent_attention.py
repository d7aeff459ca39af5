"""Latent attention on CPU in compiled kernels (``csrc/kernels/latent.h``), over core's cache layouts.

A row of the cache is converted to float32 once for all query heads; on CPUs with AMX or AVX-512 BF16, rows of bfloat16
are multiplied as they lie, and weights are rounded to bfloat16 (``csrc/kernels/latent_tiles.h``). Requests with one
query are split by positions over the threads and merged by log-sum-exp; those with more are split by queries. Which is
which the kernels find in the batch's own arrays, as they find lengths and pages, so that a recorded call serves any
later step with as many requests and tokens.

Axes: T query tokens, H query heads, L latent size, R rope size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from hardpoint_cpu import native
from hardpoint_cpu.native_attention import CODES
from hardpoint_cpu.ops.arguments import misfit
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
    PlainLayout,
    Reason,
    ScaledLayout,
)


class NativeLatentAttention(LatentBackend):
    """See the top of this file."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY
    exact_lengths: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        self._dtype = getattr(torch, spec.dtype)
        self._store = native.kernel_number(f"latent_store_{spec.dtype}")
        self._attend = native.kernel_number(f"latent_attention_{spec.kv_dtype}")
        self._merge = native.kernel_number("latent_merge_splits")

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse where there are no compiled kernels."""
        reason = native.missing()
        return [reason] if reason else []

    def store(self, call: LatentStoreCall) -> None:
        """See LatentBackend. Nothing is written to slots of the null page."""
        spec, slots, tokens = self.spec, call.slot_mapping, call.slot_mapping.shape[0]
        for name, x, size in (("latent", call.latent, spec.latent_size), ("rope_key", call.rope_key, spec.rope_size)):
            if x.dtype != self._dtype or x.shape != (tokens, size):
                raise misfit("store", name, x, self._dtype, (tokens, size))
        if slots.dtype != torch.int32:
            raise misfit("store", "slot_mapping", slots, torch.int32, ("T",))
        if not tokens:
            return
        latent, rope_key, slots = native.rows(call.latent), native.rows(call.rope_key), slots.contiguous()
        native.run(
            self._store,
            latent.data_ptr(),
            latent.stride(0),
            rope_key.data_ptr(),
            rope_key.stride(0),
            *_pages(call.cache),
            tokens,
            spec.latent_size,
            spec.rope_size,
            spec.block_size,
            CODES[spec.kv_dtype],
            slots.data_ptr(),
        )

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """See AttentionBackend."""
        return AttentionMetadata(batch)

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend."""
        self._run(call, call.metadata.batch, torch.get_num_threads(), None)

    def _run(self, call: LatentCall, batch: AttentionBatch, threads: int, most_splits: int | None) -> None:
        """Attend as over ``threads`` threads, with memory for ``most_splits``, or as many as these make."""
        spec = self.spec
        sizes = (("q_latent", spec.latent_size), ("q_rope", spec.rope_size), ("out", spec.latent_size))
        for name, size in sizes:
            x = getattr(call, name)
            if x.dtype != self._dtype or x.shape[1:] != (spec.num_heads, size):
                raise misfit("attention", name, x, self._dtype, ("T", spec.num_heads, size))
        for name in ("query_start", "seq_lens", "block_table"):
            x = getattr(batch, name)
            if x.dtype != torch.int32 or (x.stride(-1) != 1 and x.shape[-1] > 1):
                raise misfit("attention", name, x, torch.int32, ("...", "one by one"))
        q_latent, q_rope, result = (_rows_of_heads(x) for x in (call.q_latent, call.q_rope, call.out))
        num_splits = most_splits or batch.num_requests + native.SPLITS_PER_THREAD * threads
        partial = torch.empty(num_splits, spec.num_heads, spec.latent_size + 2, dtype=torch.float32)
        arguments = (
            *_strided(q_latent),
            *_strided(q_rope),
            *_strided(result),
            CODES[spec.dtype],
            *_pages(call.cache),
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
            batch.num_requests,
            spec.num_heads,
            spec.latent_size,
            spec.rope_size,
            spec.block_size,
            spec.scale,
            partial.data_ptr(),
            threads,
            *_listed(call.indices),
        )
        native.run(self._attend, *arguments)
        native.run(self._merge, *arguments)
        if result is not call.out:
            call.out[: batch.num_tokens] = result[: batch.num_tokens]


class NativeQuantizedLatentAttention(NativeLatentAttention):
    """The same over latents of 8 bits with a scale each, and rotated keys in the model's dtype."""

    layout: ClassVar[CacheLayout] = ScaledLayout()


_MANY_THREADS = 1 << 20
"""Among so many, a split has the fewest positions that one may have, which depends on the sizes of a row alone: a call
would have to have more than ``native.SPLITS_PER_THREAD`` splits for each thread, and ``_PARTIAL_BYTES`` hold fewer."""
_PARTIAL_BYTES = 1 << 26
"""Memory for the partial results of the splits of one call; more only where a single token has more."""


@dataclass(kw_only=True)
class _TokensInSlices(AttentionMetadata):
    """``slices``: batches of adjacent tokens, each token a request, with the most splits that each batch has."""

    slices: Sequence[tuple[AttentionBatch, int]]


class NativeBatchInvariantLatentAttention(NativeLatentAttention):
    """Each query is given to the kernel as a request of its own, and all splits have one size.

    Queries do not depend on each other, so a step is cut into calls whose partial results fit in ``_PARTIAL_BYTES``.
    """

    capture: ClassVar[CaptureGrade] = CaptureGrade.NEVER

    def plan(self, batch: AttentionBatch) -> _TokensInSlices:
        """See AttentionBackend."""
        spec, counts = self.spec, batch.query_start.diff()
        requests = torch.arange(len(counts)).repeat_interleave(counts, output_size=batch.num_tokens)
        tokens = torch.arange(batch.num_tokens, dtype=torch.int32)
        ends = batch.seq_lens[requests] - batch.query_start[requests + 1] + tokens + 1
        by_token = replace(
            batch,
            query_start=torch.arange(batch.num_tokens + 1, dtype=torch.int32),
            seq_lens=ends.to(torch.int32),
            block_table=batch.block_table[requests].contiguous(),
            query_start_host=tuple(range(batch.num_tokens + 1)),
            seq_lens_host=(0,) * batch.num_tokens,  # read on the device alone
            num_decodes=batch.num_tokens,
        )
        read = ends if spec.top_k is None else ends.clamp(max=spec.top_k)
        smallest = -(-native.LEAST_LATENT_SPLIT // (spec.latent_size + spec.rope_size))
        splits = ((read + smallest - 1) // smallest).tolist()
        most = _PARTIAL_BYTES // (4 * spec.num_heads * (spec.latent_size + 2))
        slices = [(_of_tokens(by_token, tokens), count) for tokens, count in _in_slices(splits, most)]
        return _TokensInSlices(batch=by_token, slices=slices)

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend."""
        planned = call.metadata
        assert isinstance(planned, _TokensInSlices)
        for batch, splits in planned.slices:
            self._run(call, batch, _MANY_THREADS, splits)


class NativeBatchInvariantQuantizedLatentAttention(NativeBatchInvariantLatentAttention, NativeQuantizedLatentAttention):
    """The same over latents of 8 bits: the scale of each depends on that latent alone."""


def _in_slices(counts: Sequence[int], most: int) -> Iterator[tuple[slice, int]]:
    """Slices of ``counts`` with their sums, as few as there may be of at most ``most``, or of one larger count."""
    first = total = 0
    for i, count in enumerate(counts):
        if i > first and total + count > most:
            yield slice(first, i), total
            first, total = i, 0
        total += count
    if counts:
        yield slice(first, len(counts)), total


def _of_tokens(by_token: AttentionBatch, tokens: slice) -> AttentionBatch:
    """The requests ``tokens`` of a batch in which each token is a request. ``query_start`` counts from its first."""
    first, last = tokens.start, tokens.stop
    return replace(
        by_token,
        query_start=by_token.query_start[first : last + 1],
        seq_lens=by_token.seq_lens[tokens],
        block_table=by_token.block_table[tokens],
        query_start_host=by_token.query_start_host[first : last + 1],
        seq_lens_host=by_token.seq_lens_host[tokens],
        num_decodes=last - first,
    )


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` [T, H, D] with the elements of a head one by one: itself where they are, else a copy."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _strided(x: torch.Tensor) -> tuple[int, int, int]:
    """The address, and elements from token to token and from head to head."""
    return x.data_ptr(), x.stride(0), x.stride(1)


def _listed(indices: torch.Tensor | None) -> tuple[int | None, int, int]:
    """The address of lists [T, K], their stride from token to token, and K; none where all positions are read."""
    if indices is None:
        return None, 0, 0
    if indices.dtype != torch.int32 or indices.stride(1) != 1:
        raise misfit("attention", "indices", indices, torch.int32, ("T", "K, one by one"))
    return indices.data_ptr(), indices.stride(0), indices.shape[1]


def _pages(cache: dict[str, torch.Tensor]) -> tuple[int | None, ...]:
    """Addresses of latents, rotated keys and scales, if there are some, each with its stride from page to page."""
    latent, rope_key, scales = cache["latent"], cache["rope_key"], cache.get("latent_scale")
    of_scales = (None, 0) if scales is None else (scales.data_ptr(), scales.stride(0))
    return latent.data_ptr(), latent.stride(0), rope_key.data_ptr(), rope_key.stride(0), *of_scales
