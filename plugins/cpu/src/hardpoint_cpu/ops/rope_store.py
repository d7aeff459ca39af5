"""Rotary embedding, and the write of keys and values to the cache.

Axes: T tokens, H query heads, K KV heads, D head size, R rotated elements, P tabulated positions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hardpoint_cpu import native
from hardpoint_cpu.ops.arguments import misfit, packed_heads
from hardpoint_plugin_api import ConfigError, OpWorkload, PluginLoadError, StoreCall

if TYPE_CHECKING:
    from hardpoint.context import Context

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CODES = {**_FLOATS, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.int8: 5}
"""Elements of caches, as ``enum Code`` of csrc/kernels/kv_store.h has them."""

Cache = dict[str, torch.Tensor]


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op. Raises ConfigError for arguments that do not fit each other."""
    return qk_norm_rope_store(q, k, k, cos_sin, positions, {}, None, eps=0.0, interleaved=interleaved)


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    cache: Cache,
    slot_mapping: torch.Tensor | None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; for the cache layout "plain", and for "plain_scaled" with a scale for each token and head.

    Where neither a norm nor the rotation changes q (or k), it is returned as it came. Nothing is stored to a cache
    without views, and nothing to slots of the null page. Raises ConfigError for arguments that do not fit each other.
    """
    op = "qk_norm_rope_store"
    tokens, heads, size = q.shape
    if k.dtype != q.dtype or k.ndim != 3 or k.shape[0] != tokens or k.shape[2] != size:
        raise misfit(op, "k", k, q.dtype, (tokens, "K", size))
    if v.dtype != q.dtype or v.shape != k.shape:
        raise misfit(op, "v", v, q.dtype, k.shape)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            continue
        if weight.dtype != q.dtype or weight.shape != (size,) or not weight.is_contiguous():
            raise misfit(op, name, weight, q.dtype, (size,))
    rotary = table_stride = 0
    if cos_sin is not None:
        if positions.dtype != torch.int64 or positions.shape != (tokens,) or not positions.is_contiguous():
            raise misfit(op, "positions", positions, torch.int64, (tokens,))
        (table_stride, step), rotary = cos_sin.stride(), cos_sin.shape[1]
        if cos_sin.dtype != torch.float32 or rotary > size or rotary % 2 or step != 1:
            raise misfit(op, "cos_sin", cos_sin, torch.float32, ("P", f"even, at most {size}"))
    k_cache, v_cache, k_scales, v_scales = map(cache.get, ("k", "v", "k_scale", "v_scale"))
    k_page = v_page = scale_page = block = element = 0
    if k_cache is not None and v_cache is not None:
        assert slot_mapping is not None
        element = _check_cache(op, k, k_cache, v_cache, slot_mapping, _FLOATS if k_scales is None else _CODES)
        k_page, v_page, block = k_cache.stride(0), v_cache.stride(0), k_cache.shape[1]
    if k_scales is not None and v_scales is not None:
        scale_page = k_scales.stride(0)
        if v_scales.stride() != k_scales.stride() or k_scales.stride()[1:] != (k.shape[1], 1):
            raise misfit(op, "k_scale", k_scales, torch.float32, ("pages", block, k.shape[1]))
    q_out = None if cos_sin is None and q_weight is None else torch.empty(q.shape, dtype=q.dtype)
    k_out = None if cos_sin is None and k_weight is None else torch.empty(k.shape, dtype=q.dtype)
    if tokens:
        q_rows, k_rows, v_rows = packed_heads(q), packed_heads(k), packed_heads(v)
        native.run(
            native.number_for(op, q.dtype),
            q_rows.data_ptr(),
            k_rows.data_ptr(),
            v_rows.data_ptr(),
            native.address(cos_sin),
            positions.data_ptr(),
            native.address(k_cache),
            native.address(v_cache),
            native.address(k_scales),
            native.address(v_scales),
            native.address(slot_mapping),
            native.address(q_weight),
            native.address(k_weight),
            native.address(q_out),
            native.address(k_out),
            tokens,
            heads,
            k.shape[1],
            size,
            rotary,
            interleaved,
            q_rows.stride(0),
            k_rows.stride(0),
            v_rows.stride(0),
            table_stride,
            k_page,
            v_page,
            scale_page,
            block,
            element,
            eps,
        )
    return q if q_out is None else q_out, k if k_out is None else k_out


def scaled_store(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op for the cache layout "plain_scaled".

    Where a checkpoint brings the scales, pages have none: the attention backend knows them, and its ``store``, part of
    that name, writes what the kernel made. Raises PluginLoadError without that part.
    """
    store = parts.get("store")
    if store is None:
        raise PluginLoadError(
            f"qk_norm_rope_store for the cache layout {workload.layout!r} needs the part 'store'; pass the attention "
            "backend's own: bind(ctx, parts={'store': backend.store})"
        )

    def norm_rope_store_scaled(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor | None,
        positions: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor,
        *weights: torch.Tensor | None,
        **scalars: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if "k_scale" in cache:
            return qk_norm_rope_store(q, k, v, cos_sin, positions, cache, slot_mapping, *weights, **scalars)
        q, k = qk_norm_rope_store(q, k, v, cos_sin, positions, {}, None, *weights, **scalars)
        store(StoreCall(k, v, cache, slot_mapping))
        return q, k

    return norm_rope_store_scaled


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See core's op. Slots of the null page are not written. Raises ConfigError for arguments that do not fit."""
    if v.dtype != k.dtype or v.shape != k.shape:
        raise misfit("store_kv", "v", v, k.dtype, k.shape)
    element = _check_cache("store_kv", k, k_cache, v_cache, slot_mapping, _FLOATS)
    if not k.numel():
        return
    k, v = packed_heads(k), packed_heads(v)
    native.run(
        native.number_for("attention_store", k.dtype),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        k_cache.data_ptr(),
        0,
        k_cache.stride(0),
        0,
        v_cache.data_ptr(),
        0,
        v_cache.stride(0),
        0,
        0,
        0,
        *k.shape,
        k_cache.shape[1],
        element,
        slot_mapping.data_ptr(),
    )


def _check_cache(
    op: str,
    k: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    elements: Container[torch.dtype],
) -> int:
    """The number of the cache's elements. Raises ConfigError."""
    tokens, heads, size = k.shape
    if slot_mapping.dtype != torch.int32 or slot_mapping.shape != (tokens,) or not slot_mapping.is_contiguous():
        raise misfit(op, "slot_mapping", slot_mapping, torch.int32, (tokens,))
    dtype, block = k_cache.dtype, k_cache.shape[1]
    if dtype not in elements:
        raise ConfigError(f"{op}: a cache of this layout cannot hold {str(dtype).removeprefix('torch.')}")
    for name, pages in (("k", k_cache), ("v", v_cache)):
        is_packed = pages.stride()[1:] == (heads * size, size, 1) or pages[:1].is_contiguous()
        if pages.dtype != dtype or pages.shape[1:] != (block, heads, size) or not is_packed:
            raise misfit(op, f"the cache of {name}", pages, dtype, ("pages", block, heads, size))
    return _CODES[dtype]
