"""Attention over keys and values that lie side by side, and the merge of two results, in Triton.

A program takes a tile of queries of one request and head. Keys are cut into two parts of elements, each a power of two,
so that 192 elements fill no tile of 256. Online softmax as in attention_tile.py, with scores in powers of two.

Axes: N requests, T queries, S keys, H heads, D size of a key, V size of a value; M queries of a tile, K keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.attention_places import find_tile
from hardpoint.kernels.attention_tile import LOG2_E
from hardpoint.kernels.launch import Launcher, aligned, in_stages_that_fit

Starts = tuple[int, ...]
_SCAN = 32
_MERGED_ROWS = 8
_LEAST_VALUES = 64
"""Elements of a tile of values in 16 bits. With 16 and 32 beside keys of 64 and more, Triton 3.6 makes wrong code for
sm_90 without an error: on an H100, results were wrong, or the kernel read outside its shared memory
(docs/measurements/h100.md).
"""


@triton.jit
def _load_rows(source, rows, stride, inside, begin, end, BLOCK: tl.constexpr):
    """Elements ``begin`` to ``end`` of rows, [rows, BLOCK]: zeros behind ``end``, and in rows that are not inside."""
    columns = begin + tl.arange(0, BLOCK)
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(source + at, mask=inside[:, None] & (columns[None, :] < end), other=0.0)


@triton.jit(
    do_not_specialize=["num_requests", "num_tiles"],
    do_not_specialize_on_alignment=["query_start", "key_start"],
)
def varlen_attention_kernel(
    q,
    k,
    v,
    out,
    sums,
    query_start,
    key_start,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    num_requests,
    num_tiles,
    score_factor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: tiles, heads. BLOCK_D elements of a key and BLOCK_E behind them, 0 for none, make up SIZE."""
    if BEGIN is not None:
        BEGIN()
    # The last tiles of a causal request take longest and so come first.
    place = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    request, tile = find_tile(place, query_start, 0, num_requests, 1, SCAN, BLOCK_M)
    if request < 0:
        return
    first_query = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - first_query
    first_key = tl.load(key_start + request)
    num_keys = tl.load(key_start + request + 1) - first_key
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < num_queries
    q += head * q_head_stride
    k += head * k_head_stride + first_key.to(tl.int64) * k_stride
    v += head * v_head_stride + first_key.to(tl.int64) * v_stride
    queries = _load_rows(q, first_query + row, q_stride, real, 0, SIZE, BLOCK_D)
    if BLOCK_E > 0:
        more_queries = _load_rows(q, first_query + row, q_stride, real, BLOCK_D, SIZE, BLOCK_E)
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, (tile + 1) * BLOCK_M)
    accumulated = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < num_keys
        keys = _load_rows(k, key, k_stride, inside, 0, SIZE, BLOCK_D)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if BLOCK_E > 0:
            more_keys = _load_rows(k, key, k_stride, inside, BLOCK_D, SIZE, BLOCK_E)
            scores = tl.dot(more_queries, tl.trans(more_keys), scores, input_precision="ieee")
        read = inside[None, :]
        if CAUSAL:
            read = read & (key[None, :] <= row[:, None])
        scores = tl.where(read, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * score_factor)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * score_factor - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        values = _load_rows(v, key, v_stride, inside, 0, VALUE_SIZE, BLOCK_V)
        accumulated = tl.dot(weights.to(values.dtype), values, accumulated * decay[:, None], input_precision="ieee")
        highest = new_highest
    columns = tl.arange(0, BLOCK_V)
    at = ((first_query + row).to(tl.int64) * HEADS + head)[:, None]
    result = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
    there = real[:, None] & (columns[None, :] < VALUE_SIZE)
    tl.store(out + at * VALUE_SIZE + columns[None, :], result.to(out.dtype.element_ty), mask=there)
    logarithm = (tl.where(highest == float("-inf"), 0.0, highest) + tl.log2(total)) / LOG2_E
    tl.store(sums + (first_query + row).to(tl.int64) * HEADS + head, logarithm, mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def merge_attention_kernel(
    out,
    sums,
    other,
    other_sums,
    num_rows,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Some rows, each a query of one head. All tensors lie without gaps."""
    if BEGIN is not None:
        BEGIN()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    mine = tl.load(sums + row, mask=there, other=0.0)
    theirs = tl.load(other_sums + row, mask=there, other=0.0)
    highest = tl.maximum(mine, theirs)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    mine = tl.exp2((mine - base) * LOG2_E)
    theirs = tl.exp2((theirs - base) * LOG2_E)
    total = mine + theirs
    columns = tl.arange(0, BLOCK)
    at = row[:, None] * SIZE + columns[None, :]
    inside = there[:, None] & (columns[None, :] < SIZE)
    x = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    shared = tl.where(total == 0.0, 1.0, total)
    x = x * (mine / shared)[:, None] + y * (theirs / shared)[:, None]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)
    tl.store(sums + row, base + tl.log2(total) / LOG2_E, mask=there)


_STAGES = 2
_attend = {stages: Launcher(varlen_attention_kernel, stages) for stages in range(1, _STAGES + 1)}
_merge = Launcher(merge_attention_kernel)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    *,
    query_starts: Starts,
    key_starts: Starts,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op."""
    tokens, heads, size = q.shape
    value_size, requests = v.shape[2], len(query_starts) - 1
    out = q.new_empty(tokens, heads, value_size)
    sums = q.new_empty(tokens, heads, dtype=torch.float32)
    if not tokens:
        return out, sums
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    rows, keys, warps = (128, 64, 8) if q.element_size() == 2 else (32, 32, 4)
    block = max(16, 1 << (size.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(size - block)) if size > block else 0
    num_tiles = tokens // rows + requests
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    value_block = max(_LEAST_VALUES if q.element_size() == 2 else 16, triton.next_power_of_2(value_size))
    constants = (heads, size, value_size, causal, _SCAN, rows, keys, block, rest, value_block)
    key = (q.dtype, *strides, *constants) if aligned(q, k, v, out, sums) else None

    def launch(stages: int) -> None:
        _attend[stages](
            key,
            (num_tiles, heads, 1),
            warps,
            *(q, k, v, out, sums, query_start, key_start),
            *strides,
            *(requests, num_tiles, scale * LOG2_E.value),
            *constants,
            stages,
        )

    in_stages_that_fit((varlen_attention_kernel, q.device, q.dtype, constants), _STAGES, launch)
    return out, sums


def merge_attention(out: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor) -> None:
    """See core's op."""
    tokens, heads, size = out.shape
    if not out.numel():
        return
    whole, totals = out.contiguous(), sums.contiguous()
    other, other_sums = other.contiguous(), other_sums.contiguous()
    key = (out.dtype, size) if aligned(whole, totals, other, other_sums) else None
    grid = (triton.cdiv(tokens * heads, _MERGED_ROWS), 1, 1)
    block = triton.next_power_of_2(size)
    _merge(key, grid, 4, whole, totals, other, other_sums, tokens * heads, size, _MERGED_ROWS, block)
    if whole is not out:
        out.copy_(whole)
    if totals is not sums:
        sums.copy_(totals)
