"""The indexer of sparse attention in Triton: writing index keys, scoring positions, choosing the best of each row.

Nothing is planned on the host: a program finds its request in the batch's own arrays. A row's scores and choice do not
depend on what stands around it.

Axes: T tokens, N requests, H index heads, D index head size, G groups of D that have a scale each, S positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.dtypes import dtype_name
from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.kernels.quantize import magnitude, round_block, rounding_scale
from hardpoint.kernels.sampling import order_of
from hardpoint.numerics import largest
from hardpoint_plugin_api import NULL_PAGE, ConfigError

Cache = dict[str, torch.Tensor]
_NULL_PAGE = tl.constexpr(NULL_PAGE)
_KEYS, _SCORES = 64, 1024
"""Positions that a program scores, and scores that it looks at at a time when it chooses."""
_MOST_HEADS = 128


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def store_index_keys_kernel(
    k_ptr,
    keys_ptr,
    scales_ptr,
    slots_ptr,
    k_stride,
    key_page_stride,
    scale_page_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """One token: its groups as a tile [BLOCK_G, BLOCK_D]. LARGEST 0 is a cache without scales."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    element = tl.arange(0, BLOCK_D)[None, :]
    page = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    inside = (group < GROUPS) & (element < SIZE) & (page != _NULL_PAGE)
    at = group * SIZE + element
    x = tl.load(k_ptr + token * k_stride + at, mask=inside, other=0.0)
    to = keys_ptr + page * key_page_stride + offset * (GROUPS * SIZE) + at
    if LARGEST == 0:
        tl.store(to, x.to(keys_ptr.dtype.element_ty), mask=inside)
    else:
        scale = rounding_scale(magnitude(x.to(tl.float32)), LARGEST)
        tl.store(to, round_block(x, scale, LARGEST, keys_ptr.dtype.element_ty), mask=inside)
        scales = scales_ptr + page * scale_page_stride + offset * GROUPS + group
        tl.store(scales, scale, mask=(group < GROUPS) & (page != _NULL_PAGE))


@triton.jit
def request_of(token, query_start, num_requests):
    """The last request that starts at or before ``token``."""
    low = token * 0
    high = num_requests - 1 + low
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(
    do_not_specialize=["num_requests", "num_positions", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "positions_ptr", "out_ptr"],
)
def index_scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    scales_ptr,
    table_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    q_stride,
    q_head_stride,
    weight_stride,
    key_page_stride,
    scale_page_stride,
    table_stride,
    num_requests,
    num_positions,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """BLOCK_N positions of one token."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = out_ptr + token.to(tl.int64) * num_positions + at
    position = tl.load(positions_ptr + token).to(tl.int32)
    read = at <= position
    request = request_of(token, starts_ptr, num_requests)
    row = table_ptr + request.to(tl.int64) * table_stride
    page = tl.load(row + at // BLOCK_SIZE, mask=read & (at < num_positions), other=0).to(tl.int64)
    if tl.program_id(1) * BLOCK_N > position:
        tl.store(out, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=at < num_positions)
        return
    head = tl.arange(0, BLOCK_H)
    element = tl.arange(0, BLOCK_D)
    q_at = q_ptr + token.to(tl.int64) * q_stride + head[:, None] * q_head_stride + element[None, :]
    key_at = keys_ptr + (page * key_page_stride + (at % BLOCK_SIZE) * (GROUPS * SIZE))[:, None] + element[None, :]
    scale_at = page * scale_page_stride + (at % BLOCK_SIZE) * GROUPS
    dots = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    for group in tl.static_range(GROUPS):
        q_there = (head < H)[:, None] & (element < SIZE)[None, :]
        q = tl.load(q_at + group * SIZE, mask=q_there, other=0.0)
        key_there = read[:, None] & (element < SIZE)[None, :]
        key = tl.load(key_at + group * SIZE, mask=key_there, other=0.0).to(q.dtype)
        products = tl.dot(q, tl.trans(key), input_precision="ieee")
        if scales_ptr is not None:
            products *= tl.load(scales_ptr + scale_at + group, mask=read, other=0.0)[None, :]
        dots += products
    weight = tl.load(weights_ptr + token.to(tl.int64) * weight_stride + head, mask=head < H, other=0.0)
    scores = tl.sum(tl.where(dots < 0.0, 0.0, dots) * weight[:, None], 0)  # a NaN stays one
    tl.store(out, tl.where(read, scores, float("-inf")), mask=at < num_positions)


@triton.jit(
    do_not_specialize=["num_scores"],
    do_not_specialize_on_alignment=["scores_ptr", "positions_ptr"],
)
def topk_positions_kernel(
    scores_ptr,
    positions_ptr,
    out_ptr,
    stride,
    num_scores,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """One row: the lowest score that is chosen, eight bits of its key at a time; then the positions in order."""
    if BEGIN is not None:
        BEGIN()
    row = tl.program_id(0).to(tl.int64)
    scores = scores_ptr + row * stride
    out = out_ptr + row * TOP_K
    count = tl.minimum(tl.load(positions_ptr + row).to(tl.int32) + 1, num_scores)
    place = tl.arange(0, BLOCK_K)
    if count <= TOP_K:
        tl.store(out + place, tl.where(place < count, place, -1), mask=place < TOP_K)
        return
    numbers = tl.arange(0, BLOCK)
    bins = tl.arange(0, 256)
    left = count * 0 + TOP_K  # of those with the bits found so far, how many are chosen
    found = (left * 0).to(tl.int64)
    for digit in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, count, BLOCK):
            inside = start + numbers < count
            keys = _key(tl.load(scores + start + numbers, mask=inside, other=0.0))
            # Keys with other bits above are counted nowhere: bins 256 and up.
            among = inside & ((keys >> (32 - 8 * digit)) == found)
            bin_of = tl.where(among, (keys >> (24 - 8 * digit)) & 255, 256).to(tl.int32)
            both = tl.reshape(tl.histogram(bin_of, 512), (2, 256))
            counts += tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, both, 0), 0)
        above = tl.cumsum(counts, 0, reverse=True) - counts
        here = (above < left) & (above + counts >= left)
        chosen = tl.max(tl.where(here, bins, 0), 0)
        left -= tl.sum(tl.where(bins == chosen, above, 0), 0)
        found = found * 256 + chosen
    written = count * 0
    equals = count * 0
    for start in range(0, count, BLOCK):
        inside = start + numbers < count
        keys = _key(tl.load(scores + start + numbers, mask=inside, other=0.0))
        equal = (inside & (keys == found)).to(tl.int32)
        rank = equals + tl.cumsum(equal, 0)
        take = inside & ((keys > found) | ((equal > 0) & (rank <= left)))
        to = written + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(out + to, start + numbers, mask=take)
        written += tl.sum(take.to(tl.int32), 0)
        equals += tl.sum(equal, 0)


@triton.jit
def _key(x):
    """Keys int64 from 0 to 2^32 - 1, of the order of float32 numbers."""
    return order_of(x).to(tl.int64) + 2147483648


_store, _score, _choose = (
    Launcher(kernel) for kernel in (store_index_keys_kernel, index_scores_kernel, topk_positions_kernel)
)


def store_index_keys(k: torch.Tensor, cache: Cache, slot_mapping: torch.Tensor) -> None:
    """See core's op. Nothing is stored to slots of the null page."""
    if not k.shape[0]:
        return
    keys, scales = cache["index_key"], cache.get("index_key_scale")
    k = k if k.stride(-1) == 1 else k.contiguous()
    _, block_size, groups, size = keys.shape
    strides = k.stride(0), keys.stride(0), 0 if scales is None else scales.stride(0)
    constants = block_size, groups, size, 0.0 if scales is None else largest(dtype_name(keys.dtype))
    dtypes = k.dtype, keys.dtype
    _store(
        (*dtypes, *strides, *constants) if aligned(k, keys, scales) else None,
        (k.shape[0], 1, 1),
        4,
        *(k, keys, scales, slot_mapping.contiguous()),
        *strides,
        *constants,
        triton.next_power_of_2(groups),
        triton.next_power_of_2(size),
    )


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See core's op. Raises ConfigError for more heads than a tile holds."""
    keys, scales = cache["index_key"], cache.get("index_key_scale")
    _, block_size, groups, size = keys.shape
    tokens, heads = q.shape[:2]
    if heads > _MOST_HEADS:
        raise ConfigError(f"index_scores: the kernel takes up to {_MOST_HEADS} index heads, got {heads}")
    places = block_table.shape[1] * block_size
    out = torch.empty(tokens, places, dtype=torch.float32, device=q.device)
    if not tokens or not places:
        return out
    q = q if q.stride(-1) == 1 else q.contiguous()
    weights = weights if weights.stride(-1) == 1 else weights.contiguous()
    block_table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    scale_stride = 0 if scales is None else scales.stride(0)
    strides = q.stride(0), q.stride(1), weights.stride(0), keys.stride(0), scale_stride
    constants = heads, block_size, groups, size
    _score(
        (q.dtype, keys.dtype, *strides, *constants) if aligned(q, weights, keys, scales) else None,
        (tokens, triton.cdiv(places, _KEYS), 1),
        4,
        *(q, weights, keys, scales, block_table, query_start.contiguous(), positions.contiguous(), out),
        *strides,
        *(block_table.stride(0), block_table.shape[0], places),
        *constants,
        max(16, triton.next_power_of_2(heads)),
        max(16, triton.next_power_of_2(size)),
        _KEYS,
    )
    return out


def topk_positions(scores: torch.Tensor, positions: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """See core's op."""
    out = torch.empty(scores.shape[0], top_k, dtype=torch.int32, device=scores.device)
    if not scores.shape[0]:
        return out
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    _choose(
        (scores.stride(0), top_k) if aligned(out) else None,
        (scores.shape[0], 1, 1),
        8,
        *(scores, positions.contiguous(), out, scores.stride(0), scores.shape[1]),
        *(top_k, triton.next_power_of_2(top_k), _SCORES),
    )
    return out
