"""Paged attention on CPU in compiled kernels (``csrc/kernels/attention*.h``), over core's cache layouts.

Requests with one query read the cache once, in order, split by positions over the threads; those with more go through
tiles of matrix products. Which is which the kernels find in the batch's own arrays, as they find lengths and pages, so
that a recorded call serves any later step with as many requests and tokens.

Axes: T query tokens, N requests, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from hardpoint_cpu import native
from hardpoint_cpu.ops.arguments import misfit, packed_heads
from hardpoint_plugin_api import (
    NVFP4,
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

CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4, "int8": 5, NVFP4: 6}
"""Dtypes by number, as ``enum Code`` of csrc/kernels/kv_store.h has them."""

_Cache = dict[str, torch.Tensor]


class NativeAttention(AttentionBackend):
    """See the top of this file. The cache has elements of 16 or 32 bits."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY
    exact_lengths: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        self._dtype = getattr(torch, spec.dtype)
        self._head_shape = (spec.num_heads, spec.head_size)
        self._kv_shape = (spec.num_kv_heads, spec.head_size)
        self._store = native.kernel_number(f"attention_store_{spec.dtype}")
        self._decode = native.kernel_number(f"attention_decode_{spec.kv_dtype}")
        self._merge = native.kernel_number("attention_merge_splits")
        self._prefill = native.kernel_number(f"attention_prefill_{spec.kv_dtype}")

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse where there are no compiled kernels."""
        reason = native.missing()
        return [reason] if reason else []

    def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
        """See AttentionBackend."""
        super().set_head_constants(
            *(None if x is None else x.to(torch.float32).contiguous() for x in (sinks, alibi_slopes))
        )

    def store(self, call: StoreCall) -> None:
        """See AttentionBackend. Nothing is written to slots of the null page."""
        k, v, cache, slot_mapping = call.k, call.v, call.cache, call.slot_mapping
        tokens, spec = slot_mapping.shape[0], self.spec
        for name, x in (("k", k), ("v", v)):
            if x.dtype != self._dtype or x.shape != (tokens, *self._kv_shape):
                raise misfit("store", name, x, self._dtype, (tokens, *self._kv_shape))
        if slot_mapping.dtype != torch.int32:
            raise misfit("store", "slot_mapping", slot_mapping, torch.int32, ("T",))
        if not tokens:
            return
        k, v, slots = packed_heads(k), packed_heads(v), slot_mapping.contiguous()
        native.run(
            self._store,
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            *_pages(cache, "k"),
            *_pages(cache, "v"),
            *map(native.address, self.cache_scales),
            tokens,
            spec.num_kv_heads,
            spec.head_size,
            spec.block_size,
            CODES[spec.kv_dtype],
            slots.data_ptr(),
        )

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """See AttentionBackend. The token says whether any request may have several queries."""
        return AttentionMetadata(batch, token=batch.any_shape or batch.num_tokens > batch.num_requests)

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend."""
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        batch, spec, threads = metadata.batch, self.spec, torch.get_num_threads()
        for name, x in (("q", q), ("out", out)):
            if x.dtype != self._dtype or x.shape[1:] != self._head_shape:
                raise misfit("attention", name, x, self._dtype, ("T", *self._head_shape))
        for name in ("query_start", "seq_lens", "block_table"):
            x = getattr(batch, name)
            if x.dtype != torch.int32 or (x.stride(-1) != 1 and x.shape[-1] > 1):
                raise misfit("attention", name, x, torch.int32, ("...", "one by one"))
        q, result = packed_heads(q), packed_heads(out)
        num_splits = batch.num_requests + native.SPLITS_PER_THREAD * threads
        partial = torch.empty(num_splits, spec.num_heads, spec.head_size + 2, dtype=torch.float32)
        (k_cache, k_page), (v_cache, v_page) = ((cache[name].data_ptr(), cache[name].stride(0)) for name in "kv")
        arguments = (
            q.data_ptr(),
            q.stride(0),
            result.data_ptr(),
            result.stride(0),
            CODES[spec.dtype],
            k_cache,
            k_page,
            v_cache,
            v_page,
            *self._scales(cache),
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
            batch.num_requests,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.block_size,
            spec.scale,
            spec.soft_cap or 0.0,
            spec.window or 0,
            spec.chunk or 0,
            native.address(self.sinks),
            native.address(self.alibi_slopes),
            partial.data_ptr(),
            threads,
        )
        native.run(self._decode, *arguments)
        native.run(self._merge, *arguments)
        if metadata.token:
            native.run(self._prefill, *arguments)
        if result is not out:
            out[: batch.num_tokens] = result[: batch.num_tokens]

    def _scales(self, cache: _Cache) -> tuple[int, int, int, int]:
        """Of keys, then of values: the address of their scales, and the stride from page to page, 0 for one scale."""
        found: list[int] = []
        for name, given in zip("kv", map(native.address, self.cache_scales), strict=True):
            _, kept, _, stride = _pages(cache, name)
            found += given or kept, stride
        return found[0], found[1], found[2], found[3]


class NativeQuantizedCacheAttention(NativeAttention):
    """The same over 8-bit elements, with scales from the checkpoint or for each token and head."""

    layout: ClassVar[CacheLayout] = ScaledLayout()


class NativeNvfp4CacheAttention(NativeAttention):
    """The same over NVFP4: elements of e2m1, scales of e4m3 for groups of 16, and those of the checkpoint for all."""

    layout: ClassVar[CacheLayout] = GroupScaledLayout()

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        self._one = torch.ones(1)

    def _scales(self, cache: _Cache) -> tuple[int, int, int, int]:
        """One for all keys and one for all values; the kernels find groups' scales behind the codes of their page."""
        k, v = (native.address(self._one if given is None else given) for given in self.cache_scales)
        return k, 0, v, 0


def _pages(cache: _Cache, name: str) -> tuple[int, int, int, int]:
    """Addresses of elements and scales (0 for none), and their strides from page to page."""
    elements, scales = cache[name], cache.get(f"{name}_scale")
    if scales is None:
        return elements.data_ptr(), 0, elements.stride(0), 0
    return elements.data_ptr(), scales.data_ptr(), elements.stride(0), scales.stride(0)
