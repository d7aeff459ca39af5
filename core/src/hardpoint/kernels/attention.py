"""Paged attention in Triton: backends over the kernels of attention_decode.py and attention_prefill.py.

Requests with one query go through the one kernel, all others through the other, in the same step. Both find lengths and
pages in the batch's own arrays, so nothing is planned on the host, and a recorded step serves any lengths.

Axes: T tokens, N requests, H query heads, K KV heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import triton

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.attention_decode import decode_attention
from hardpoint.kernels.attention_groups import store_groups
from hardpoint.kernels.attention_prefill import prefill_attention
from hardpoint.kernels.attention_store import store_keys_and_values
from hardpoint.kernels.attention_tuning import VARIANTS, DecodeTuning, Tables
from hardpoint.kernels.launch import Launcher, aligned, in_stages_that_fit
from hardpoint.numerics import largest
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    AttentionWorkload,
    BuildContext,
    CacheLayout,
    CaptureGrade,
    DeviceInfo,
    GroupScaledLayout,
    PlainLayout,
    Reason,
    ScaledLayout,
    StoreCall,
)
from hardpoint_plugin_api.elements import BUILT_IN

LOG2_E = 1.4426950408889634
_MOST_HEAD_SIZE = 256
AMPLITUDES = {"int8": 2.0**6, "float8_e4m3fn": 2.0**8, "float8_e4m3fnuz": 2.0**7, "float8_e5m2": 2.0**15}
"""Half the largest element or more: a token's scale times that is about as large as its values, and no larger."""
MOST_MERGED = 128
"""Splits of one request: as many as a tile of their sums has rows."""

SCANNED = (1, 32, 256)
_MOST_PREFILLS = 32
"""More requests with several queries than this in one step are unusual."""
_STORE_WARPS = 4

_Cache = dict[str, torch.Tensor]


@dataclass
class TritonMetadata(AttentionMetadata):
    """Numbers of tilings: ``decode`` of the requests with one query, ``prefill`` of those with several.

    ``prefill`` is None where no request has several.
    """

    decode: int = 0
    prefill: int | None = None


@dataclass(frozen=True)
class _Decode:
    """The decode kernel, cut in one way. ``arguments`` are its last ones, by how many lengths a program looks at."""

    tuning: DecodeTuning
    splits: int
    head_blocks: int
    constants: Mapping[str, Any]
    launcher: Launcher
    arguments: Mapping[int, tuple[Any, ...]]


class TritonAttention(AttentionBackend):
    """See the top of this file. The cache has elements of 16 or 32 bits."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY
    exact_lengths: ClassVar[bool] = False
    store_kernel: ClassVar[Any] = store_keys_and_values
    least_columns: ClassVar[int] = 16
    """To which smaller heads are filled up."""
    tables: ClassVar[Tables | None] = None
    """Tables that take the place of the device's, for tests and benchmarks."""

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        tables = self.tables or Tables.of(ctx)
        self._group = spec.num_heads // spec.num_kv_heads
        scales = self._scales_of(spec)
        # Where one of two dtypes may not hold the other's numbers, products are in float32.
        wide = scales == "none" and spec.kv_dtype != spec.dtype
        itemsize = 4 if wide else dtype_of(spec.dtype).itemsize
        block_d = max(self.least_columns, triton.next_power_of_2(spec.head_size))
        capped = spec.soft_cap is not None
        self._factors = (
            (2 * LOG2_E * spec.scale / spec.soft_cap, LOG2_E * spec.soft_cap)
            if spec.soft_cap is not None
            else (LOG2_E * spec.scale, 0.0)
        )
        facts = {"wide": itemsize == 4, "quantized_cache": scales != "none"}
        self._prefill_tuning = tables.prefill.find(**facts)
        self.prefill_tiles = self._prefill_tuning.tiles
        alike: dict[str, Any] = {
            "NUM_HEADS": spec.num_heads,
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HEAD_SIZE": spec.head_size,
            "BLOCK_SIZE": spec.block_size,
            "WINDOW": spec.window,
            "CHUNK": spec.chunk,
            "CAPPED": capped,
            "SCALES": scales,
            "AMPLITUDE": AMPLITUDES.get(spec.kv_dtype, 1.0),
            "WIDE": wide,
            "BLOCK_D": block_d,
        }
        self._decode_table = tables.decode.given(**facts, kv_heads=spec.num_kv_heads)
        self._tunings = self._decode_table.uses
        self.decodes = [self._cut_decode(tuning, itemsize, alike) for tuning in self._tunings]
        self.prefill_constants = [
            {
                **alike,
                "SCAN": scan_size(_MOST_PREFILLS),
                "BLOCK_M": tiles.rows,
                "BLOCK_N": tiles.num_keys(block_d, itemsize),
                "STAGES": tiles.num_stages,
            }
            for tiles in self.prefill_tiles
        ]
        element = spec.kv_dtype if scales in ("static", "token") else None
        self._store_constants: dict[str, Any] = {
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HEAD_SIZE": spec.head_size,
            "BLOCK_SIZE": spec.block_size,
            "SCALES": scales,
            "LOWEST": (-largest(element) - (element == "int8")) if element else 0.0,
            "LARGEST": largest(element) if element else 0.0,
            "BLOCK_D": block_d,
            "ROWS": max(1, 1024 // block_d),
        }
        self._prefill = [Launcher(prefill_attention, tiles.num_stages, tiles.options) for tiles in self.prefill_tiles]
        self._prefill_arguments = [
            [in_order(prefill_attention, {**constants, "STAGES": n + 1}) for n in range(constants["STAGES"])]
            for constants in self.prefill_constants
        ]
        self._store = Launcher(self.store_kernel)
        self._store_arguments = in_order(self.store_kernel, self._store_constants)
        splits = max(one.splits for one in self.decodes)
        counters = max(one.splits * one.head_blocks for one in self.decodes)
        size = f"{spec.num_heads}x{spec.head_size}_{splits}_{counters}"
        self._partial_key, self._counters_key = f"triton_paged_partial_{size}", f"triton_paged_counters_{size}"
        ctx.resources.declare(self._partial_key, 4 * splits * spec.num_heads * (spec.head_size + 2), scope="step")
        ctx.resources.declare(self._counters_key, 4 * counters)

    def _cut_decode(self, tuning: DecodeTuning, itemsize: int, alike: Mapping[str, Any]) -> _Decode:
        tiles = tuning.tiles
        heads = min(tiles.rows, triton.next_power_of_2(self._group))
        head_blocks = self.spec.num_kv_heads * -(-self._group // heads)
        splits = max(2, tuning.programs // head_blocks)
        num_keys = tiles.num_keys(alike["BLOCK_D"], itemsize)
        constants = {
            **alike,
            "SPLITS": splits,
            "MOST_SPLITS": min(MOST_MERGED, triton.next_power_of_2(splits + 1) // 2),
            "MIN_CHUNK": max(tuning.min_chunk, num_keys),
            "BLOCK_M": max(16, heads),
            "BLOCK_MERGE": heads,
            "BLOCK_N": num_keys,
            "STAGES": tiles.num_stages,
        }
        arguments = {scan: in_order(decode_attention, {**constants, "SCAN": scan}) for scan in map(scan_size, SCANNED)}
        launcher = Launcher(decode_attention, tiles.num_stages, tiles.options)
        return _Decode(tuning, splits, head_blocks, constants, launcher, arguments)

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse heads whose tiles would fit no device, and elements that the device cannot convert."""
        if workload.head_size is not None and workload.head_size > _MOST_HEAD_SIZE:
            most = f"up to {_MOST_HEAD_SIZE}"
            return [Reason("head-size", "heads are too large", wanted=str(workload.head_size), supported=most)]
        if workload.kv_dtype is not None and workload.kv_dtype.startswith("float8") and device.fp8 is None:
            return [Reason("kv-dtype", "the device has no 8-bit floats", wanted=workload.kv_dtype)]
        return []

    @classmethod
    def variants(cls) -> dict[str, type[Self]]:
        """Backends with other tunings, by what is changed: for benchmarks, which say which is best on a device."""
        return {name: type(cls.__name__, (cls,), {"tables": tables}) for name, tables in VARIANTS.items()}

    def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
        """See AttentionBackend."""
        super().set_head_constants(
            *(None if x is None else x.to(torch.float32).contiguous() for x in (sinks, alibi_slopes))
        )

    def store(self, call: StoreCall) -> None:
        """See AttentionBackend."""
        slot_mapping = call.slot_mapping
        rows = slot_mapping.shape[0] * self.spec.num_kv_heads
        if not rows:
            return
        k, v = (evenly_placed(_with_adjacent_elements(x)) for x in (call.k, call.v))
        pages, strides = self._pages(call.cache), (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        self._store(
            (*strides, *pages[4:]) if aligned(k, v, *pages[:4]) else None,
            (-(-rows // self._store_constants["ROWS"]), 2, 1),
            _STORE_WARPS,
            k,
            *strides[:2],
            v,
            *strides[2:],
            *pages,
            slot_mapping,
            rows,
            *self._store_arguments,
        )

    def plan(self, batch: AttentionBatch) -> TritonMetadata:
        """See AttentionBackend. The token says how many requests have one query, and how large the others' tiles are.

        Under a graph's key every request has one query, so there is one token for each.
        """
        starts = batch.query_start_host
        first = batch.num_decodes
        decode = self._tunings.index(self._decode_table.find(decodes=first)) if first else 0
        if first == batch.num_requests:
            return TritonMetadata(batch, token=first, decode=decode)
        longest = self._group * max(b - a for a, b in zip(starts[first:], starts[first + 1 :], strict=False))
        rows = self._group * (starts[-1] - starts[first]) * self.spec.num_kv_heads
        tiling = self._prefill_tuning.tiling(longest, rows)
        token = (first, batch.num_requests, starts[-1] - starts[first], tiling)
        return TritonMetadata(batch, token=token, decode=decode, prefill=tiling)

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend. Raises for heads whose elements do not lie one by one."""
        q, out, metadata = call.q, call.out, call.metadata
        assert isinstance(metadata, TritonMetadata)
        assert q.stride(2) == out.stride(2) == 1 or q.shape[2] == 1, "heads' elements must be adjacent"
        q = evenly_placed(q)
        batch, pages = metadata.batch, self._pages(call.cache)
        strides = (q.stride(0), q.stride(1), out.stride(0), out.stride(1))
        alike = (q, *strides[:2], out, *strides[2:], *pages, batch.block_table, batch.block_table.stride(0))
        # Whatever else decides a kernel's variant stays as it is for a layer.
        known = aligned(q, out, *pages[:4], self.sinks, self.alibi_slopes)
        key = (*strides, *pages[4:], self.sinks is None, self.alibi_slopes is None) if known else None
        if batch.num_decodes:
            resources, scan, decode = self.ctx.resources, scan_size(batch.num_decodes), self.decodes[metadata.decode]
            decode.launcher(
                key and (scan, *key),
                ((decode.splits + batch.num_decodes) * decode.head_blocks, 1, 1),
                decode.tuning.tiles.num_warps,
                *alike,
                batch.seq_lens,
                batch.num_decodes,
                self.sinks,
                self.alibi_slopes,
                resources.get(self._partial_key).view(torch.float32),
                resources.get(self._counters_key).view(torch.int32),
                *self._factors,
                *decode.arguments[scan],
            )
        if metadata.prefill is not None:
            tiles, first, starts = self.prefill_tiles[metadata.prefill], batch.num_decodes, batch.query_start_host
            num_tiles = (starts[-1] - starts[first]) * self._group // tiles.rows + batch.num_requests - first
            launcher, arguments = self._prefill[metadata.prefill], self._prefill_arguments[metadata.prefill]

            def prefill(num_stages: int) -> None:
                launcher(
                    key,
                    (num_tiles * self.spec.num_kv_heads, 1, 1),
                    tiles.num_warps,
                    *alike,
                    batch.seq_lens,
                    batch.query_start,
                    first,
                    batch.num_requests,
                    num_tiles,
                    self.sinks,
                    self.alibi_slopes,
                    *self._factors,
                    *arguments[num_stages - 1],
                )

            in_stages_that_fit((self.spec, tiles, q.device), tiles.num_stages, prefill)

    def _scales_of(self, spec: AttentionSpec) -> str:
        """The kernels' SCALES: "none", or whether a token's head has a scale or all keys have one."""
        if spec.kv_dtype not in BUILT_IN:
            return "none"
        return "static" if spec.static_cache_scales else "token"

    def _pages(self, cache: _Cache) -> tuple[Any, ...]:
        """Elements and scales of keys and of values, and the strides from page to page."""
        k_scales, v_scales = self.cache_scales
        if k_scales is None and "k_scale" in cache:
            k_scales, v_scales = cache["k_scale"], cache["v_scale"]
        stride = 0 if k_scales is None else k_scales.stride(0)
        return cache["k"], cache["v"], k_scales, v_scales, cache["k"].stride(0), stride


class TritonQuantizedCacheAttention(TritonAttention):
    """The same over 8-bit elements, with scales from the checkpoint or for each token and head."""

    layout: ClassVar[CacheLayout] = ScaledLayout()


class TritonNvfp4CacheAttention(TritonAttention):
    """The same over NVFP4: elements of e2m1, scales of e4m3 for groups of 16, and those of the checkpoint for all."""

    layout: ClassVar[CacheLayout] = GroupScaledLayout()
    store_kernel: ClassVar[Any] = store_groups
    least_columns: ClassVar[int] = 32
    """With one group in a row, Triton 3.6 gave wrong numbers on an H200 (docs/measurements/h200.md)."""

    def _scales_of(self, spec: AttentionSpec) -> str:
        return "group"

    def _pages(self, cache: _Cache) -> tuple[Any, ...]:
        """Codes, the scales of all keys and of all values, and the stride from page to page, twice. Groups' scales are
        found behind the codes of their page."""
        stride = cache["k"].stride(0)
        return cache["k"], cache["v"], *self.cache_scales, stride, stride


def in_order(kernel: Any, constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """The last of a kernel's arguments."""
    return tuple(constants[name] for name in kernel.arg_names if name in constants)


def scan_size(num_requests: int) -> int:
    """How many lengths a program looks at at once: of one request there is nothing to sum up, and few fit a warp."""
    return next(most for most in SCANNED if num_requests <= most or most == SCANNED[-1])


def _with_adjacent_elements(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def evenly_placed(x: torch.Tensor) -> torch.Tensor:
    """``x`` [T, H, D], or a copy where its address or its rows' stride is no multiple of 16 and a copy's would be one.

    Triton compiles for such multiples, and again for others, which takes seconds. The time of a copy was not measured.
    """
    uneven = x.stride(0) % 16 and not x.shape[1] * x.shape[2] % 16
    return x.clone(memory_format=torch.contiguous_format) if uneven or not aligned(x) else x
