"""Paged attention in Triton: backends over the kernels of attention_decode.py and attention_prefill.py.

Requests with one query go through the one kernel, all others through the other, in the same step. Both find lengths and
pages in the batch's own arrays, so nothing is planned on the host, and a recorded step serves any lengths.

Axes: T tokens, N requests, H query heads, K KV heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import triton

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.attention_decode import decode_attention
from hardpoint.kernels.attention_prefill import prefill_attention
from hardpoint.kernels.attention_store import store_keys_and_values
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
    PlainLayout,
    Reason,
    ScaledLayout,
    StoreCall,
)

_LOG2_E = 1.4426950408889634
_MOST_HEAD_SIZE = 256
_AMPLITUDES = {"int8": 2.0**6, "float8_e4m3fn": 2.0**8, "float8_e5m2": 2.0**15}
"""Half the largest element or more: a token's scale times that is about as large as its values, and no larger."""
_MOST_MERGED = 128
"""Splits of one request: as many as a tile of their sums has rows."""

_SCANNED = (1, 32, 256)
_MOST_PREFILLS = 32
"""More requests with several queries than this in one step are unusual."""
_STORE_WARPS = 4

_Cache = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: ``rows`` of queries and heads, and as many keys as take ``key_bytes``; powers of two."""

    rows: int
    key_bytes: int
    num_warps: int
    num_stages: int

    def num_keys(self, block_d: int, itemsize: int) -> int:
        """Keys of one tile."""
        return min(128, max(16, self.key_bytes // (block_d * itemsize)))


@dataclass(frozen=True)
class Tuning:
    """Everything about the kernels that changes speed alone.

    ``programs``: about how many programs long contexts are split over, two or so for each processor of a large device;
    ``min_chunk``: the fewest tokens of a split, or a tile of keys where that is more.
    ``decode.rows``: the most query heads of one program. ``prefill``: tiles in ascending order of rows; a step takes
    the largest with which it still makes so many programs, and none larger than what a request fills. The wide ones are
    for products in float32, which run on ordinary multipliers: code and registers grow with the tile.
    """

    programs: int = 256
    min_chunk: int = 128
    decode: Tiles = Tiles(rows=32, key_bytes=16384, num_warps=4, num_stages=3)
    prefill: tuple[Tiles, ...] = (
        Tiles(rows=16, key_bytes=16384, num_warps=4, num_stages=3),
        Tiles(rows=64, key_bytes=16384, num_warps=4, num_stages=3),
        Tiles(rows=128, key_bytes=16384, num_warps=8, num_stages=3),
    )
    wide_decode: Tiles = Tiles(rows=32, key_bytes=8192, num_warps=4, num_stages=3)
    wide_prefill: tuple[Tiles, ...] = (Tiles(rows=32, key_bytes=8192, num_warps=8, num_stages=3),)


_DEFAULT = Tuning()
_LARGE, _MEDIUM = Tiles(128, 16384, num_warps=8, num_stages=3), Tiles(64, 16384, num_warps=4, num_stages=3)
_VARIANTS = {
    "decode 2 stages": replace(_DEFAULT, decode=replace(_DEFAULT.decode, num_stages=2)),
    "decode 4 stages": replace(_DEFAULT, decode=replace(_DEFAULT.decode, num_stages=4)),
    "decode 8 KiB": replace(_DEFAULT, decode=replace(_DEFAULT.decode, key_bytes=8192, num_stages=4)),
    "decode 8 KiB, 2 warps": replace(_DEFAULT, decode=replace(_DEFAULT.decode, key_bytes=8192, num_warps=2)),
    "decode 8 KiB, 3 stages": replace(_DEFAULT, decode=replace(_DEFAULT.decode, key_bytes=8192)),
    "decode 8 KiB of 32": replace(
        _DEFAULT, min_chunk=32, decode=replace(_DEFAULT.decode, key_bytes=8192, num_stages=4)
    ),
    "decode 8 KiB of 64": replace(
        _DEFAULT, min_chunk=64, decode=replace(_DEFAULT.decode, key_bytes=8192, num_stages=4)
    ),
    "decode 4 stages of 64": replace(_DEFAULT, min_chunk=64, decode=replace(_DEFAULT.decode, num_stages=4)),
    "decode 4 stages, 8 warps": replace(_DEFAULT, decode=replace(_DEFAULT.decode, num_stages=4, num_warps=8)),
    "decode 8 KiB, 6 stages": replace(_DEFAULT, decode=replace(_DEFAULT.decode, key_bytes=8192, num_stages=6)),
    "decode 2 warps": replace(_DEFAULT, decode=replace(_DEFAULT.decode, num_warps=2)),
    "decode 2 warps, 2 stages": replace(_DEFAULT, decode=replace(_DEFAULT.decode, num_warps=2, num_stages=2)),
    "decode 32 KiB, 2 stages": replace(_DEFAULT, decode=replace(_DEFAULT.decode, key_bytes=32768, num_stages=2)),
    "decode 32 KiB, 8 warps": replace(_DEFAULT, decode=replace(_DEFAULT.decode, key_bytes=32768, num_warps=8)),
    "decode over 128": replace(_DEFAULT, programs=128),
    "decode over 512": replace(_DEFAULT, programs=512),
    "decode over 512 of 256": replace(_DEFAULT, programs=512, min_chunk=256),
    "decode of 256": replace(_DEFAULT, min_chunk=256),
    "decode of 1024": replace(_DEFAULT, min_chunk=1024),
    "decode of 1024, 32 KiB, 8 warps": replace(
        _DEFAULT, min_chunk=1024, decode=replace(_DEFAULT.decode, key_bytes=32768, num_warps=8)
    ),
    "prefill 64": replace(_DEFAULT, prefill=(_MEDIUM,)),
    "prefill 64, 2 stages": replace(_DEFAULT, prefill=(replace(_MEDIUM, num_stages=2),)),
    "prefill 64, 8 KiB": replace(_DEFAULT, prefill=(replace(_MEDIUM, key_bytes=8192),)),
    "prefill 64, 32 KiB, 2 stages": replace(_DEFAULT, prefill=(replace(_MEDIUM, key_bytes=32768, num_stages=2),)),
    "prefill 128": replace(_DEFAULT, prefill=(_LARGE,)),
    "prefill 128, 2 stages": replace(_DEFAULT, prefill=(replace(_LARGE, num_stages=2),)),
    "prefill 128, 32 KiB, 2 stages": replace(_DEFAULT, prefill=(replace(_LARGE, key_bytes=32768, num_stages=2),)),
    "prefill 128, 32 KiB": replace(_DEFAULT, prefill=(replace(_LARGE, key_bytes=32768),)),
}
"""Worth trying on a device that these have not been measured on."""


@dataclass
class TritonMetadata(AttentionMetadata):
    """``prefill`` is the number of the tiling of those requests that have several queries; None where none has."""

    prefill: int | None = None


class TritonAttention(AttentionBackend):
    """See the top of this file. The cache has elements of 16 or 32 bits."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY
    exact_lengths: ClassVar[bool] = False
    tuning: ClassVar[Tuning] = Tuning()

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        tuning, group = self.tuning, spec.num_heads // spec.num_kv_heads
        self._group = group
        # Where one of two dtypes may not hold the other's numbers, products are in float32.
        wide = dtype_of(spec.kv_dtype).itemsize > 1 and spec.kv_dtype != spec.dtype
        itemsize = 4 if wide else dtype_of(spec.dtype).itemsize
        self.decode_tiles, self.prefill_tiles = (
            (tuning.wide_decode, tuning.wide_prefill) if itemsize == 4 else (tuning.decode, tuning.prefill)
        )
        block_d = max(16, triton.next_power_of_2(spec.head_size))
        heads = min(self.decode_tiles.rows, triton.next_power_of_2(group))
        self._head_blocks = spec.num_kv_heads * -(-group // heads)
        self._splits = max(2, tuning.programs // self._head_blocks)
        capped = spec.soft_cap is not None
        self._factors = (
            (2 * _LOG2_E * spec.scale / spec.soft_cap, _LOG2_E * spec.soft_cap)
            if spec.soft_cap is not None
            else (_LOG2_E * spec.scale, 0.0)
        )
        scales = "none"
        if dtype_of(spec.kv_dtype).itemsize == 1:
            scales = "static" if spec.static_cache_scales else "token"
        alike: dict[str, Any] = {
            "NUM_HEADS": spec.num_heads,
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HEAD_SIZE": spec.head_size,
            "BLOCK_SIZE": spec.block_size,
            "WINDOW": spec.window,
            "CHUNK": spec.chunk,
            "CAPPED": capped,
            "SCALES": scales,
            "AMPLITUDE": _AMPLITUDES.get(spec.kv_dtype, 1.0),
            "WIDE": wide,
            "BLOCK_D": block_d,
        }
        num_keys = self.decode_tiles.num_keys(block_d, itemsize)
        self.decode_constants = {
            **alike,
            "SPLITS": self._splits,
            "MOST_SPLITS": min(_MOST_MERGED, triton.next_power_of_2(self._splits + 1) // 2),
            "MIN_CHUNK": max(tuning.min_chunk, num_keys),
            "BLOCK_M": max(16, heads),
            "BLOCK_MERGE": heads,
            "BLOCK_N": num_keys,
            "STAGES": self.decode_tiles.num_stages,
        }
        self.prefill_constants = [
            {
                **alike,
                "SCAN": _scan(_MOST_PREFILLS),
                "BLOCK_M": tiles.rows,
                "BLOCK_N": tiles.num_keys(block_d, itemsize),
                "STAGES": tiles.num_stages,
            }
            for tiles in self.prefill_tiles
        ]
        element = spec.kv_dtype if scales != "none" else None
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
        self._decode = Launcher(decode_attention, self.decode_tiles.num_stages)
        self._decode_arguments = {
            scan: _in_order(decode_attention, {**self.decode_constants, "SCAN": scan}) for scan in map(_scan, _SCANNED)
        }
        self._prefill = [Launcher(prefill_attention, tiles.num_stages) for tiles in self.prefill_tiles]
        self._prefill_arguments = [
            [_in_order(prefill_attention, {**constants, "STAGES": n + 1}) for n in range(constants["STAGES"])]
            for constants in self.prefill_constants
        ]
        self._store = Launcher(store_keys_and_values)
        self._store_arguments = _in_order(store_keys_and_values, self._store_constants)
        size = f"{spec.num_heads}x{spec.head_size}_{self._splits}x{self._head_blocks}"
        self._partial_key, self._counters_key = f"triton_paged_partial_{size}", f"triton_paged_counters_{size}"
        ctx.resources.declare(self._partial_key, 4 * self._splits * spec.num_heads * (spec.head_size + 2), scope="step")
        ctx.resources.declare(self._counters_key, 4 * self._splits * self._head_blocks)

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
        return {name: type(cls.__name__, (cls,), {"tuning": tuning}) for name, tuning in _VARIANTS.items()}

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
        k, v = (_evenly_placed(_with_adjacent_elements(x)) for x in (call.k, call.v))
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
        if first == batch.num_requests:
            return TritonMetadata(batch, token=first)
        longest = self._group * max(b - a for a, b in zip(starts[first:], starts[first + 1 :], strict=False))
        rows = self._group * (starts[-1] - starts[first]) * self.spec.num_kv_heads
        sizes, tiling = self.prefill_tiles, 0
        while tiling + 1 < len(sizes) and (
            sizes[tiling].rows < longest and rows >= self.tuning.programs * sizes[tiling + 1].rows
        ):
            tiling += 1
        token = (first, batch.num_requests, starts[-1] - starts[first], tiling)
        return TritonMetadata(batch, token=token, prefill=tiling)

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend. Raises for heads whose elements do not lie one by one."""
        q, out, metadata = call.q, call.out, call.metadata
        assert isinstance(metadata, TritonMetadata)
        assert q.stride(2) == out.stride(2) == 1 or q.shape[2] == 1, "heads' elements must be adjacent"
        q = _evenly_placed(q)
        batch, pages = metadata.batch, self._pages(call.cache)
        strides = (q.stride(0), q.stride(1), out.stride(0), out.stride(1))
        alike = (q, *strides[:2], out, *strides[2:], *pages, batch.block_table, batch.block_table.stride(0))
        # Whatever else decides a kernel's variant stays as it is for a layer.
        known = aligned(q, out, *pages[:4], self.sinks, self.alibi_slopes)
        key = (*strides, *pages[4:], self.sinks is None, self.alibi_slopes is None) if known else None
        if batch.num_decodes:
            resources, scan = self.ctx.resources, _scan(batch.num_decodes)
            self._decode(
                key and (scan, *key),
                ((self._splits + batch.num_decodes) * self._head_blocks, 1, 1),
                self.decode_tiles.num_warps,
                *alike,
                batch.seq_lens,
                batch.num_decodes,
                self.sinks,
                self.alibi_slopes,
                resources.get(self._partial_key).view(torch.float32),
                resources.get(self._counters_key).view(torch.int32),
                *self._factors,
                *self._decode_arguments[scan],
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

    def _pages(self, cache: _Cache) -> tuple[Any, ...]:
        """Elements and scales of keys and of values, and the strides from page to page."""
        k_scales, v_scales = self.cache_scales
        if k_scales is None and "k_scale" in cache:
            k_scales, v_scales = cache["k_scale"], cache["v_scale"]
        stride = 0 if k_scales is None else k_scales.stride(0)
        return cache["k"], cache["v"], k_scales, v_scales, cache["k"].stride(0), stride


class FewDecodes(TritonAttention):
    """For no more decodes than a device has multiprocessors: each program has more on its way, 128 KiB of it."""

    tuning: ClassVar[Tuning] = Tuning(min_chunk=64, decode=Tiles(rows=32, key_bytes=16384, num_warps=4, num_stages=4))


class ManyDecodes(TritonAttention):
    """For more decodes: smaller tiles, so that more programs share a multiprocessor and their ends do not show."""

    tuning: ClassVar[Tuning] = Tuning(decode=Tiles(rows=32, key_bytes=8192, num_warps=4, num_stages=4))


class VeryManyDecodes(TritonAttention):
    """For hundreds of them."""

    tuning: ClassVar[Tuning] = Tuning(decode=Tiles(rows=32, key_bytes=8192, num_warps=2, num_stages=3))


class TritonQuantizedCacheAttention(TritonAttention):
    """The same over 8-bit elements, with scales from the checkpoint or for each token and head."""

    layout: ClassVar[CacheLayout] = ScaledLayout()


def _in_order(kernel: Any, constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """The last of a kernel's arguments."""
    return tuple(constants[name] for name in kernel.arg_names if name in constants)


def _scan(num_requests: int) -> int:
    """How many lengths a program looks at at once: of one request there is nothing to sum up, and few fit a warp."""
    return next(most for most in _SCANNED if num_requests <= most or most == _SCANNED[-1])


def _with_adjacent_elements(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _evenly_placed(x: torch.Tensor) -> torch.Tensor:
    """``x`` [T, H, D], or a copy where its address or its rows' stride is no multiple of 16 and a copy's would be one.

    Triton compiles for such multiples, and again for others, which takes seconds. What a copy costs was not measured.
    """
    uneven = x.stride(0) % 16 and not x.shape[1] * x.shape[2] % 16
    return x.clone(memory_format=torch.contiguous_format) if uneven or not aligned(x) else x
