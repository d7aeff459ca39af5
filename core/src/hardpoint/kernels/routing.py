"""Mixtures of experts around their matmuls: the choice of experts, and tokens sorted by expert and back.

Nothing waits for the device, and every order is fixed: of equals the lower number is chosen, an expert's rows stand in
the order of the tokens, and a token's rows are added up in the order of its experts.

Axes: T tokens, E experts, K experts per token, G groups of experts with S neighbours each, P = T * K pairs of token and
expert, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.ops.routing import SCORINGS, Routed, check_bias
from hardpoint_plugin_api import ConfigError, UnknownNameError

_NONE = tl.constexpr(-(2**63))
"""Below the key of every number."""
_TINY = tl.constexpr(1e-20)
_FEW_PAIRS, _MANY_PAIRS, _ELEMENTS = 256, 4096, 1024


@triton.jit
def _ordered(x, number):
    """Keys int64 of float32 x: greater numbers have greater keys, NaN the greatest, of equals the lower ``number``."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, which it equals
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def _number(key):
    """The number that a key was made with."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    logits_stride,
    scaling,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPED: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """One token, its experts as a tile [BLOCK_G, BLOCK_S]."""
    if BEGIN is not None:
        BEGIN()
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = E // G
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    expert = group * size + member
    inside = (group < G) & (member < size)
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    choice = scores
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    elif not GROUPED:
        choice = logits  # scores that differ may round to one
    keys = tl.where(inside, _ordered(choice, expert), _NONE)
    if GROUPED:
        best = tl.max(keys, 1, keep_dims=True)
        group_score = tl.sum(tl.where(keys == best, choice, 0.0), 1, keep_dims=True)
        if (bias_ptr is not None) and size > 1:
            rest = tl.where(keys == best, _NONE, keys)
            second = tl.max(rest, 1, keep_dims=True)
            group_score += tl.sum(tl.where(rest == second, choice, 0.0), 1, keep_dims=True)
        group_keys = tl.where(group < G, _ordered(group_score, group), _NONE)
        chosen = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(group_keys, 0, keep_dims=True)
            chosen = chosen | (group_keys == best)
            group_keys = tl.where(group_keys == best, _NONE, group_keys)
        keys = tl.where(chosen, keys, _NONE)
    place = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(keys, 1), 0)
        weight = tl.sum(tl.sum(tl.where(keys == best, scores, 0.0), 1), 0)
        keys = tl.where(keys == best, _NONE, keys)
        ids = tl.where(place == k, _number(best), ids)
        weights = tl.where(place == k, weight, weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + _TINY)
    tl.store(ids_ptr + row * TOP_K + place, ids, mask=place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights * scaling, mask=place < TOP_K)


@triton.jit
def _local(ids_ptr, map_ptr, pair, inside, ids_stride, ids_step, num_experts, K: tl.constexpr):
    """The experts of pairs on this rank, ``num_experts`` where there is none, above that behind the last pair."""
    at = (pair // K).to(tl.int64) * ids_stride + (pair % K) * ids_step
    ids = tl.load(ids_ptr + at, mask=inside, other=-1)
    if map_ptr is not None:
        ids = tl.load(map_ptr + ids, mask=inside & (ids >= 0), other=-1)
    return tl.where(inside, tl.where(ids < 0, num_experts, ids), num_experts + 1)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(
    ids_ptr,
    map_ptr,
    order_ptr,
    starts_ptr,
    places_ptr,
    num_pairs,
    ids_stride,
    ids_step,
    num_experts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """One expert finds the places of its pairs; the program behind the last one, those of pairs without any."""
    if BEGIN is not None:
        BEGIN()
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        local = _local(ids_ptr, map_ptr, pair, pair < num_pairs, ids_stride, ids_step, num_experts, K)
        before += (local < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts_ptr + expert, place.to(tl.int64))
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        local = _local(ids_ptr, map_ptr, pair, pair < num_pairs, ids_stride, ids_step, num_experts, K)
        mine = (local == expert).to(tl.int32)
        at = place + tl.cumsum(mine, 0) - 1
        tl.store(order_ptr + at, pair, mask=mine == 1)
        absent = expert == num_experts
        tl.store(places_ptr + pair, tl.where(absent, -1, at).to(tl.int64), mask=mine == 1)
        place += tl.sum(mine, 0)


@triton.jit
def permute_rows_kernel(
    x_ptr,
    order_ptr,
    starts_ptr,
    rows_ptr,
    H,
    x_stride,
    num_experts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A block of one row: of its pair's token, or zeros behind the last expert's."""
    if BEGIN is not None:
        BEGIN()
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = (tl.load(order_ptr + place) // K).to(tl.int64)
    there = place < tl.load(starts_ptr + num_experts)
    x = tl.load(x_ptr + token * x_stride + column, mask=there & (column < H), other=0.0)
    tl.store(rows_ptr + place * H + column, x, mask=column < H)


@triton.jit
def unpermute_rows_kernel(
    rows_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    H,
    rows_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A block of one token's sum."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places_ptr + token * K + k)
        weight = tl.load(weights_ptr + token * K + k)
        row = rows_ptr + place * rows_stride + column
        x = tl.load(row, mask=(place >= 0) & (column < H), other=0.0).to(tl.float32)
        total += tl.where(place >= 0, x * weight, 0.0)
    tl.store(out_ptr + token * H + column, total, mask=column < H)


_route_rows, _sort_pairs = Launcher(route_kernel), Launcher(sort_pairs_kernel)
_permute_rows, _unpermute_rows = Launcher(permute_rows_kernel), Launcher(unpermute_rows_kernel)


def topk_softmax(
    logits: torch.Tensor, bias: torch.Tensor | None = None, *, top_k: int, renormalize: bool, scaling: float
) -> Routed:
    """See core's op. Raises ConfigError for a bias that does not fit."""
    return _route(logits, bias, top_k, "softmax", renormalize, scaling, None)


def topk_sigmoid(
    logits: torch.Tensor, bias: torch.Tensor | None = None, *, top_k: int, renormalize: bool, scaling: float
) -> Routed:
    """See core's op. Raises ConfigError for a bias that does not fit."""
    return _route(logits, bias, top_k, "sigmoid", renormalize, scaling, None)


def grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    scoring: str,
    renormalize: bool,
    scaling: float,
) -> Routed:
    """See core's op. Raises ConfigError for arguments that do not fit, UnknownNameError for the scoring."""
    return _route(logits, bias, top_k, scoring, renormalize, scaling, (num_groups, top_groups))


def route_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling: float,
    num_groups: int,
    top_groups: int,
) -> Routed:
    """See core's op. Raises ConfigError for arguments that do not fit, UnknownNameError for the scoring."""
    groups = (num_groups, top_groups) if num_groups > 1 else None
    return _route(logits, bias, top_k, scoring, renormalize, scaling, groups)


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling: float,
    groups: tuple[int, int] | None,
) -> Routed:
    """``groups`` are the number of groups, and of those that experts are chosen from; None: no groups."""
    if scoring not in SCORINGS:
        raise UnknownNameError("scoring", scoring, SCORINGS)
    tokens, experts = logits.shape
    number, kept = groups or (1, 1)
    if experts % number or not 1 <= kept <= number or not 0 <= top_k <= kept * (experts // number):
        raise ConfigError(
            f"route_topk: cannot choose {top_k} experts from the best {kept} of {number} groups of {experts} experts; "
            "the number of groups must divide the number of experts, and the best groups must have enough of them"
        )
    if bias is not None:
        check_bias(bias, logits)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if ids.numel():
        stride = logits.stride(0)
        made = (experts, top_k, number, kept, groups is not None, scoring == "sigmoid", renormalize)
        key = (logits.dtype, stride, bias is None, made, logits.get_device())
        _route_rows(
            key if aligned(logits, bias, ids, weights) else None,
            (tokens, 1, 1),
            1,
            logits,
            bias,
            ids,
            weights,
            stride,
            float(scaling),
            *made,
            triton.next_power_of_2(number),
            triton.next_power_of_2(experts // number),
            triton.next_power_of_2(top_k),
        )
    return ids, weights


def sort_pairs(
    ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expert ids int32 [T, K] -> (pairs int32 [P] by place, starts int64 [E + 1], places int64 [T, K]).

    As ``hardpoint.ops.moe_permute.sort_pairs``, with the map of core's op moe_permute.
    """
    count = ids.numel()
    order = torch.empty(count, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int64, device=ids.device)
    places = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    block = _FEW_PAIRS if count <= _FEW_PAIRS else _MANY_PAIRS
    top_k, strides = ids.shape[1], ids.stride()
    key = (ids.dtype, expert_map is None, strides, num_experts, top_k, block, ids.get_device())
    _sort_pairs(
        key if aligned(ids, expert_map, order, starts, places) else None,
        (num_experts + 1, 1, 1),
        max(1, block // 256),
        ids,
        expert_map,
        order,
        starts,
        places,
        count,
        *strides,
        num_experts,
        top_k,
        block,
    )
    return order, starts, places


def moe_permute(
    x: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None = None, *, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See core's op."""
    if x.stride(1) != 1:
        x = x.contiguous()
    order, starts, places = sort_pairs(ids, num_experts, expert_map)
    count, size = order.shape[0], x.shape[1]
    rows = torch.empty((count, size), dtype=x.dtype, device=x.device)
    if rows.numel():
        block = min(_ELEMENTS, triton.next_power_of_2(size))
        stride, top_k = x.stride(0), ids.shape[1]
        key = (x.dtype, size, stride, num_experts, top_k, x.get_device()) if aligned(x, order, starts, rows) else None
        grid = (count, -(-size // block), 1)
        _permute_rows(key, grid, 4, x, order, starts, rows, size, stride, num_experts, top_k, block)
    return rows, starts, places


def moe_unpermute(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See core's op."""
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    tokens, top_k = places.shape
    size = rows.shape[1]
    out = torch.empty((tokens, size), dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(_ELEMENTS, triton.next_power_of_2(size))
        places, weights, stride = places.contiguous(), weights.contiguous(), rows.stride(0)
        key = (rows.dtype, weights.dtype, size, stride, top_k, rows.get_device())
        grid = (tokens, -(-size // block), 1)
        _unpermute_rows(
            key if aligned(rows, places, weights, out) else None,
            grid,
            4,
            rows,
            places,
            weights,
            out,
            size,
            stride,
            top_k,
            block,
        )
    return out
