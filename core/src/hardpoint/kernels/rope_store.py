"""All that stands between the query-key-value projection and attention, in one launch: norms, rotation, the cache.

A program has HEADS heads of one token: query heads, or KV heads, whose keys and values it stores. Heads are taken in
three parts, as the rotation pairs them: the first and the second element of each pair, and what does not rotate. HEADS
follows from the head's size alone, so that a row's bits do not depend on what stands around it.

Axes: T tokens, H query heads, K KV heads, D head size, R rotated elements, P tabulated positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.kernels.quantize import magnitude, round_block, rounding_scale
from hardpoint.numerics import largest
from hardpoint_plugin_api import NULL_PAGE, ConfigError, OpWorkload, PluginLoadError, StoreCall

if TYPE_CHECKING:
    from hardpoint.context import Context

Cache = dict[str, torch.Tensor]
_WARPS = 2
_NULL_PAGE = tl.constexpr(NULL_PAGE)


@triton.jit
def _parts(D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, STILL: tl.constexpr):
    """Where the parts' elements stand in a head, and which of them there are: first, second, paired, still, resting."""
    pair = tl.arange(0, PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + R // 2
    still = R + tl.arange(0, STILL)
    return first, second, pair < R // 2, still, still < D


@triton.jit
def _read(
    x_ptr,
    heads,
    here,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    STILL: tl.constexpr,
):
    """The parts of heads at offsets ``heads`` [HEADS, 1], float32: [HEADS, PAIRS] twice, [HEADS, STILL]."""
    first, second, paired, still, resting = _parts(D, R, INTERLEAVED, PAIRS, STILL)
    a = tl.zeros((heads.shape[0], PAIRS), tl.float32)
    b = a
    c = tl.zeros((heads.shape[0], STILL), tl.float32)
    if R > 0:
        a = tl.load(x_ptr + heads + first, mask=here & paired, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + heads + second, mask=here & paired, other=0.0).to(tl.float32)
    if R < D:
        c = tl.load(x_ptr + heads + still, mask=here & resting, other=0.0).to(tl.float32)
    return a, b, c


@triton.jit
def _write(
    x_ptr,
    heads,
    here,
    a,
    b,
    c,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    STILL: tl.constexpr,
):
    first, second, paired, still, resting = _parts(D, R, INTERLEAVED, PAIRS, STILL)
    if R > 0:
        tl.store(x_ptr + heads + first, a, mask=here & paired)
        tl.store(x_ptr + heads + second, b, mask=here & paired)
    if R < D:
        tl.store(x_ptr + heads + still, c, mask=here & resting)


@triton.jit
def _norm_and_turn(
    a,
    b,
    c,
    weights,
    cos,
    sin,
    eps,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    STILL: tl.constexpr,
):
    """The parts normed where there are weights, then rotated: in DTYPE, and rounded to it where the reference does."""
    if weights is not None:
        squares = tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)
        factor = tl.rsqrt((squares + tl.sum(c * c, 1, keep_dims=True)) / D + eps)
        a = ((a * factor).to(DTYPE).to(tl.float32) * weights[0]).to(DTYPE).to(tl.float32)
        b = ((b * factor).to(DTYPE).to(tl.float32) * weights[1]).to(DTYPE).to(tl.float32)
        c = ((c * factor).to(DTYPE).to(tl.float32) * weights[2]).to(DTYPE).to(tl.float32)
    if R > 0:
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE)


@triton.jit
def _store_rounded(
    cache_ptr,
    scale_ptr,
    heads,
    scales,
    here,
    a,
    b,
    c,
    LARGEST: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    STILL: tl.constexpr,
):
    """Heads to 8-bit elements, with a scale of each head's own at ``scales``."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    c = c.to(tl.float32)
    bits = tl.maximum(tl.maximum(magnitude(a), magnitude(b)), magnitude(c))
    scale = rounding_scale(bits, LARGEST)
    element: tl.constexpr = cache_ptr.dtype.element_ty
    a = round_block(a, scale, LARGEST, element)
    b = round_block(b, scale, LARGEST, element)
    c = round_block(c, scale, LARGEST, element)
    _write(cache_ptr, heads, here, a, b, c, D, R, INTERLEAVED, PAIRS, STILL)
    tl.store(scale_ptr + scales, scale, mask=here)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])  # parts of a step's one copy
def qk_norm_rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    table_stride,
    position_stride,
    slot_stride,
    block_size,
    k_page_stride,
    k_offset_stride,
    k_slot_head_stride,
    v_page_stride,
    v_offset_stride,
    v_slot_head_stride,
    scale_page_stride,
    scale_offset_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,
    K_CHANGES: tl.constexpr,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    STILL: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """HEADS heads of one token. q and k are changed in place.

    R 0 is no rotation, a null pointer no norm, Q_PROGRAMS 0 queries that stay as they are, a null cache no store, and
    LARGEST 0 a cache without scales. Positions and slots, which the step began with, the table and the norms' weights
    are read while the kernel before this one may still run.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    stores: tl.constexpr = k_cache_ptr is not None
    if stores:
        slot = tl.load(slots_ptr + token * slot_stride).to(tl.int64)
    cos = 1.0
    sin = 0.0
    if R > 0:
        pair = tl.arange(0, PAIRS) + tl.zeros((HEADS, 1), tl.int32)
        row = cos_sin_ptr + tl.load(positions_ptr + token * position_stride).to(tl.int64) * table_stride
        cos = tl.load(row + pair, mask=pair < R // 2, other=1.0)
        sin = tl.load(row + R // 2 + pair, mask=pair < R // 2, other=0.0)
    weights = None
    if q_weight_ptr is not None or k_weight_ptr is not None:
        everywhere = tl.zeros((HEADS, 1), tl.int32)  # each thread reads what it needs: nothing to exchange
        weight_ptr = k_weight_ptr if q_weight_ptr is None else q_weight_ptr
        if q_weight_ptr is not None and k_weight_ptr is not None:  # noqa: SIM102  # known when it is compiled
            if part >= Q_PROGRAMS:
                weight_ptr = k_weight_ptr
        weights = _read(weight_ptr, everywhere, everywhere == 0, D, R, INTERLEAVED, PAIRS, STILL)
    q_weights = weights if q_weight_ptr is not None else None
    k_weights = weights if k_weight_ptr is not None else None
    if BEGIN is not None:
        BEGIN()
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    if part < Q_PROGRAMS:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        heads = token * q_stride + head.to(tl.int64) * q_head_stride
        a, b, c = _read(q_ptr, heads, head < H, D, R, INTERLEAVED, PAIRS, STILL)
        a, b, c = _norm_and_turn(a, b, c, q_weights, cos, sin, eps, dtype, D, R, INTERLEAVED, PAIRS, STILL)
        _write(q_ptr, heads, head < H, a, b, c, D, R, INTERLEAVED, PAIRS, STILL)
    else:
        head = (part - Q_PROGRAMS) * HEADS + tl.arange(0, HEADS)[:, None]
        here = head < K
        if stores:  # everything is read before the first write, which the compiler moves no read across
            values = token * v_stride + head.to(tl.int64) * v_head_stride
            x, y, z = _read(v_ptr, values, here, D, R, INTERLEAVED, PAIRS, STILL)
        heads = token * k_stride + head.to(tl.int64) * k_head_stride
        a, b, c = _read(k_ptr, heads, here, D, R, INTERLEAVED, PAIRS, STILL)
        a, b, c = _norm_and_turn(a, b, c, k_weights, cos, sin, eps, dtype, D, R, INTERLEAVED, PAIRS, STILL)
        if K_CHANGES:
            _write(k_ptr, heads, here, a, b, c, D, R, INTERLEAVED, PAIRS, STILL)
        if stores:
            page = slot // block_size
            offset = slot % block_size
            here = here & (page != _NULL_PAGE)  # nobody reads it, and padding would race for it
            k_heads = page * k_page_stride + offset * k_offset_stride + head * k_slot_head_stride
            v_heads = page * v_page_stride + offset * v_offset_stride + head * v_slot_head_stride
            if LARGEST == 0:
                _write(k_cache_ptr, k_heads, here, a, b, c, D, R, INTERLEAVED, PAIRS, STILL)
                _write(v_cache_ptr, v_heads, here, x, y, z, D, R, INTERLEAVED, PAIRS, STILL)
            else:
                at = page * scale_page_stride + offset * scale_offset_stride + head
                _store_rounded(
                    k_cache_ptr, k_scale_ptr, k_heads, at, here, a, b, c, LARGEST, D, R, INTERLEAVED, PAIRS, STILL
                )
                _store_rounded(
                    v_cache_ptr, v_scale_ptr, v_heads, at, here, x, y, z, LARGEST, D, R, INTERLEAVED, PAIRS, STILL
                )


_qk_norm_rope_store = Launcher(qk_norm_rope_store_kernel)


@functools.cache
def _tile(size: int, rotary: int) -> tuple[int, int, int]:
    """(HEADS, PAIRS, STILL): 1,024 elements, so that each of two warps' threads reads 16 bytes of each 2-byte half."""
    heads = max(1, 1024 // triton.next_power_of_2(size))
    return heads, triton.next_power_of_2(max(1, rotary // 2)), triton.next_power_of_2(max(1, size - rotary))


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    cache: Cache,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; for the cache layout "plain", and for "plain_scaled" with a scale for each token and head.

    q and k are changed in place and returned, whatever their strides. Nothing is stored to slots of the null page.
    Raises ConfigError for a table or values that do not fit.
    """
    return _launch(q, k, v, cos_sin, positions, cache, slot_mapping, q_weight, k_weight, eps, interleaved)


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; q and k are changed in place and returned. Raises ConfigError for a table that does not fit."""
    return _launch(q, k, None, cos_sin, positions, {}, None, None, None, 0.0, interleaved)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See core's op. Nothing is stored to slots of the null page. Raises ConfigError for values unlike the keys."""
    _launch(k, k, v, None, slot_mapping, {"k": k_cache, "v": v_cache}, slot_mapping, None, None, 0.0, False)


def scaled_store(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """qk_norm_rope_store for the cache layout "plain_scaled".

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
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        *,
        eps: float,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = cache if "k_scale" in cache else {}
        q, k = _launch(q, k, v, cos_sin, positions, views, slot_mapping, q_weight, k_weight, eps, interleaved)
        if not views:
            store(StoreCall(k, v, cache, slot_mapping))
        return q, k

    return norm_rope_store_scaled


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    cache: Mapping[str, torch.Tensor],
    slots: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_changes = cos_sin is not None or q_weight is not None
    k_changes = cos_sin is not None or k_weight is not None
    if q.stride(2) != 1 and q_changes:
        q = q.contiguous()
    if k.stride(2) != 1:
        k = k.contiguous()
    tokens, num_heads, size = q.shape
    num_kv_heads = k.shape[1]
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    if rotary > size or rotary % 2:
        raise ConfigError(f"a rotary table must have an even number of columns, at most {size}, got {rotary}")
    k_cache, v_cache = cache.get("k"), cache.get("v")
    k_scales, v_scales = cache.get("k_scale"), cache.get("v_scale")
    if v is None or k_cache is None or v_cache is None:
        v = k_cache = v_cache = None
    elif v.shape != k.shape:
        raise ConfigError(f"values must be as keys, {list(k.shape)}, got {list(v.shape)}")
    elif v.stride(2) != 1:
        v = v.contiguous()
    heads, pairs, still = _tile(size, rotary)
    q_programs = triton.cdiv(num_heads, heads) if q_changes else 0
    kv_programs = triton.cdiv(num_kv_heads, heads) if k_changes or k_cache is not None else 0
    if not tokens or not q_programs + kv_programs:
        return q, k
    k_at: tuple[int, ...] = (0, 0, 0, 1)
    v_at = k_at
    if k_cache is not None and v_cache is not None:
        k_at, v_at = k_cache.stride(), v_cache.stride()
    strides = (*q.stride()[:2], *k.stride()[:2], *((0, 0) if v is None else v.stride()[:2]))
    table_stride = 0 if cos_sin is None else cos_sin.stride(0)
    position_stride, slot_stride = positions.stride(0), 0 if slots is None else slots.stride(0)
    block_size, cache_dtype = (1, None) if k_cache is None else (k_cache.shape[1], k_cache.dtype)
    scales_at = (0, 0) if k_scales is None else k_scales.stride()[:2]
    key: Hashable = None
    if aligned(q, k, v, cos_sin, k_cache, v_cache, k_scales, v_scales, q_weight, k_weight):
        key = (
            (q.dtype, k.dtype, v is None or v.dtype, cos_sin is None or cos_sin.dtype, positions.dtype, cache_dtype),
            (q_weight is None or q_weight.dtype, k_weight is None or k_weight.dtype, interleaved, q.get_device()),
            (size, num_heads, num_kv_heads, rotary),
            (strides, table_stride, position_stride, slot_stride, block_size, k_at, v_at, scales_at),
        )
    _qk_norm_rope_store(
        key,
        (tokens, q_programs + kv_programs, 1),
        _WARPS,
        q,
        k,
        v,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        slots,
        q_weight,
        k_weight,
        *strides,
        table_stride,
        position_stride,
        slot_stride,
        block_size,
        *k_at[:3],
        *v_at[:3],
        *scales_at,
        float(eps),
        num_heads,
        num_kv_heads,
        size,
        rotary,
        interleaved,
        q_programs,
        k_changes,
        0.0 if k_cache is None or k_scales is None else largest(_name(k_cache.dtype)),
        heads,
        pairs,
        still,
    )
    return q, k


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
