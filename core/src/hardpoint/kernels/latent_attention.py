"""Latent attention in Triton: a backend over the kernels of latent_decode.py and latent_prefill.py.

As in attention.py, requests with one query go through the one kernel, all others through the other, in the same step;
nothing is planned on the host, and a recorded step serves any lengths. Where queries have lists of positions, the
kernel of latent_listed.py takes each by itself.

Axes: T tokens, N requests, H query heads, L latent size, R rope size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import triton

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.attention import AMPLITUDES, LOG2_E, MOST_MERGED, SCANNED, evenly_placed, in_order, scan_size
from hardpoint.kernels.attention_tuning import DecodeTuning, PrefillTuning, Tables, Tiles
from hardpoint.kernels.latent_decode import decode_latent_attention
from hardpoint.kernels.latent_listed import attend_listed_latents
from hardpoint.kernels.latent_prefill import prefill_latent_attention
from hardpoint.kernels.latent_store import store_latents
from hardpoint.kernels.latent_tuning import VARIANTS
from hardpoint.kernels.launch import Launcher, aligned, in_stages_that_fit
from hardpoint.kernels.tables import table_of
from hardpoint.numerics import largest
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
from hardpoint_plugin_api.elements import BUILT_IN

_FACTS: Mapping[str, type] = {"wide": bool, "heads": int}
_MOST_LATENT_SIZE, _MOST_ROPE_SIZE = 512, 128
_MOST_PREFILLS = 32
_STORE_WARPS, _STORED = 4, 2048


@dataclass
class LatentMetadata(AttentionMetadata):
    """``prefill`` says which tiles serve the requests with several queries: a number, None where there are none."""

    prefill: int | None = None


@dataclass(frozen=True)
class _Cut:
    """A kernel, cut in one way. ``arguments`` are its last ones, by the number of stages less one."""

    tiles: Tiles
    launcher: Launcher
    constants: Mapping[str, Any]
    arguments: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, kernel: Any, tiles: Tiles, constants: Mapping[str, Any]) -> _Cut:
        stages = range(1, tiles.num_stages + 1)
        arguments = tuple(in_order(kernel, {**constants, "STAGES": stage}) for stage in stages)
        return cls(tiles, Launcher(kernel, tiles.num_stages, tiles.options), constants, arguments)


class TritonLatentAttention(LatentBackend):
    """See the top of this file."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY
    exact_lengths: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    """Whether each query has a program of its own, also where it has no list."""
    tables: ClassVar[Tables | None] = None
    """Tables that take the place of the device's, for tests and benchmarks."""

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        tables = self.tables or latent_tables(ctx)
        # Where one of two dtypes may not hold the other's numbers, products are in float32.
        scaled = spec.kv_dtype in BUILT_IN
        wide = spec.kv_dtype != spec.dtype and not scaled
        itemsize = 4 if wide else dtype_of(spec.dtype).itemsize
        sizes = {
            "LATENT_SIZE": spec.latent_size,
            "ROPE_SIZE": spec.rope_size,
            "BLOCK_SIZE": spec.block_size,
            "BLOCK_L": (block := max(16, triton.next_power_of_2(spec.latent_size))),
            "BLOCK_R": max(16, triton.next_power_of_2(spec.rope_size)),
        }
        amplitude = AMPLITUDES.get(spec.kv_dtype, 1.0)
        alike = {**sizes, "NUM_HEADS": spec.num_heads, "WIDE": wide, "AMPLITUDE": amplitude}
        facts = {"wide": itemsize == 4, "heads": spec.num_heads}
        self._factor = LOG2_E * spec.scale
        self._prefill_tuning = tables.prefill.find(**facts)
        self.prefills = [
            _Cut.of(
                prefill_latent_attention,
                tiles,
                {
                    **alike,
                    "SCAN": scan_size(_MOST_PREFILLS),
                    "BLOCK_M": tiles.rows,
                    "BLOCK_N": tiles.num_keys(block, itemsize),
                },
            )
            for tiles in self._prefill_tuning.tiles
        ]
        tuning = tables.decode.find(**facts)
        heads = min(tuning.tiles.rows, triton.next_power_of_2(spec.num_heads))
        self._head_blocks = -(-spec.num_heads // heads)
        self._splits = max(2, tuning.programs // self._head_blocks)
        num_keys = tuning.tiles.num_keys(block, itemsize)
        constants = {
            **alike,
            "SPLITS": self._splits,
            "MOST_SPLITS": min(MOST_MERGED, triton.next_power_of_2(self._splits + 1) // 2),
            "MIN_CHUNK": max(tuning.min_chunk, num_keys),
            "BLOCK_M": max(16, heads),
            "BLOCK_MERGE": heads,
            "BLOCK_N": num_keys,
        }
        self.decodes = {
            scan: _Cut.of(decode_latent_attention, tuning.tiles, {**constants, "SCAN": scan}) for scan in SCANNED
        }
        own = {name: x for name, x in constants.items() if name in attend_listed_latents.arg_names}
        self.one_by_one = (
            None
            if spec.top_k is None and not self.apart
            else _Cut.of(attend_listed_latents, tuning.tiles, {**own, "TOP_K": spec.top_k})
        )
        self._rows_stored = max(1, _STORED // block)
        self._store = Launcher(store_latents)
        self._store_arguments = in_order(
            store_latents,
            {**sizes, "LARGEST": float(largest(spec.kv_dtype)) if scaled else 0, "ROWS": self._rows_stored},
        )
        size = f"{spec.num_heads}x{spec.latent_size}_{self._splits}_{self._head_blocks}"
        self._partial_key, self._counters_key = f"triton_latent_partial_{size}", f"triton_latent_counters_{size}"
        nbytes = 4 * self._splits * spec.num_heads * (spec.latent_size + 2)
        ctx.resources.declare(self._partial_key, nbytes, scope="step")
        ctx.resources.declare(self._counters_key, 4 * self._splits * self._head_blocks)

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse sizes whose tiles would fit no device."""
        found = []
        for name, size, most in (
            ("latent_size", workload.latent_size, _MOST_LATENT_SIZE),
            ("rope_size", workload.rope_size, _MOST_ROPE_SIZE),
        ):
            if size is not None and size > most:
                found.append(Reason("shape", f"{name} is too large", wanted=str(size), supported=f"up to {most}"))
        return found

    @classmethod
    def variants(cls) -> dict[str, type[Self]]:
        """Backends with other tunings, by what is changed: for benchmarks, which say which is best on a device."""
        return {name: type(cls.__name__, (cls,), {"tables": tables}) for name, tables in VARIANTS.items()}

    def store(self, call: LatentStoreCall) -> None:
        """See LatentBackend."""
        tokens, slots = call.slot_mapping.shape[0], call.slot_mapping
        if not tokens:
            return
        latent, rope_key = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.latent, call.rope_key))
        strides, pages = (latent.stride(0), rope_key.stride(0)), _pages(call.cache)
        self._store(
            (*strides, *pages[2:4], pages[5]) if aligned(latent, rope_key, *_alignable(pages)) else None,
            (-(-tokens // self._rows_stored), 1, 1),
            _STORE_WARPS,
            latent,
            strides[0],
            rope_key,
            strides[1],
            *pages,
            slots,
            tokens,
            *self._store_arguments,
        )

    def plan(self, batch: AttentionBatch) -> LatentMetadata:
        """See StepPlanner. The token says how many requests have one query, and how large the others' tiles are."""
        starts, first = batch.query_start_host, batch.num_decodes
        if first == batch.num_requests:
            return LatentMetadata(batch, token=first)
        heads = self.spec.num_heads
        longest = heads * max(b - a for a, b in zip(starts[first:], starts[first + 1 :], strict=False))
        rows = heads * (starts[-1] - starts[first])
        number = self._prefill_tuning.tiling(longest, rows)
        return LatentMetadata(batch, (first, batch.num_requests, starts[-1] - starts[first], number), number)

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend. Raises for heads whose elements do not lie one by one."""
        metadata, batch, out = call.metadata, call.metadata.batch, call.out
        assert isinstance(metadata, LatentMetadata)
        for x in (call.q_latent, call.q_rope, out):
            assert x.stride(2) == 1 or x.shape[2] == 1, "heads' elements must be adjacent"
        q_latent, q_rope = evenly_placed(call.q_latent), evenly_placed(call.q_rope)
        pages = _pages(call.cache)
        strides = [x.stride()[:2] for x in (q_latent, q_rope, out)]
        rows = (q_latent, *strides[0], q_rope, *strides[1], out, *strides[2])
        table = (batch.block_table, batch.block_table.stride(0), batch.seq_lens)
        alike = (*rows, *pages, *table)
        key = (*strides, *pages[2:4], pages[5]) if aligned(q_latent, q_rope, out, *_alignable(pages)) else None
        if self.one_by_one is not None:
            indices = call.indices
            assert (indices is None) == (self.spec.top_k is None), "a spec with top_k has lists"
            lists = (batch.query_start, batch.num_requests, indices, 0 if indices is None else indices.stride(0))
            self._launch(self.one_by_one, key, batch.num_tokens * self._head_blocks, alike, *lists)
            return
        if batch.num_decodes:
            self._decode(batch.num_decodes, key, rows, pages, table)
        if metadata.prefill is not None:
            cut, first, starts = self.prefills[metadata.prefill], batch.num_decodes, batch.query_start_host
            queries = (starts[-1] - starts[first]) * self.spec.num_heads
            num_tiles = queries // cut.tiles.rows + batch.num_requests - first
            self._launch(cut, key, num_tiles, alike, batch.query_start, first, batch.num_requests, num_tiles)

    def _decode(
        self, count: int, key: Any, rows: tuple[Any, ...], pages: tuple[Any, ...], table: tuple[Any, ...]
    ) -> None:
        """Launch the kernel for the ``count`` requests with one query each; a device may have a kernel of its own.

        ``rows``: queries and results with their strides; ``pages``: see ``_pages``; ``table``: the block table, its
        stride and the lengths. ``key`` is the launcher's.
        """
        resources = self.ctx.resources
        grid = (self._splits + count) * self._head_blocks
        partial, counters = (resources.get(name) for name in (self._partial_key, self._counters_key))
        more = (count, partial.view(torch.float32), counters.view(torch.int32))
        self._launch(self.decodes[scan_size(count)], key, grid, (*rows, *pages, *table), *more)

    def _launch(self, cut: _Cut, key: Any, grid: int, alike: tuple[Any, ...], *more: Any) -> None:
        def launch(num_stages: int) -> None:
            last = cut.arguments[num_stages - 1]
            place = key and (num_stages, *key)
            cut.launcher(place, (grid, 1, 1), cut.tiles.num_warps, *alike, *more, self._factor, *last)

        device = alike[0].device
        in_stages_that_fit((self.spec, cut.launcher, cut.tiles, device), cut.tiles.num_stages, launch)


class TritonQuantizedLatentAttention(TritonLatentAttention):
    """The same over latents of 8 bits with a scale each, and rotated keys in the model's dtype."""

    layout: ClassVar[CacheLayout] = ScaledLayout()


class TritonBatchInvariantLatentAttention(TritonLatentAttention):
    """Each query by itself, over its positions in order: what else is in the batch has no say in its result."""

    apart: ClassVar[bool] = True


class TritonBatchInvariantQuantizedLatentAttention(TritonBatchInvariantLatentAttention):
    """The same over latents of 8 bits with a scale each."""

    layout: ClassVar[CacheLayout] = ScaledLayout()


def latent_tables(ctx: BuildContext) -> Tables:
    """The tables for the context's device. Raises ConfigError for a file that is not right."""
    return Tables(
        table_of(ctx, "latent_decode", DecodeTuning, _FACTS), table_of(ctx, "latent_prefill", PrefillTuning, _FACTS)
    )


def _pages(cache: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int, int, torch.Tensor | None, int]:
    """Latents and rotated keys, the strides of each from page to page, and the same of scales, where there are some."""
    latents, rope_keys, scales = cache["latent"], cache["rope_key"], cache.get("latent_scale")
    return latents, rope_keys, latents.stride(0), rope_keys.stride(0), scales, 0 if scales is None else scales.stride(0)


def _alignable(pages: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors of ``_pages``."""
    return (x for x in pages if isinstance(x, torch.Tensor))
