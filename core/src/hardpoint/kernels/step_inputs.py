"""Inputs of a step: the slots where its tokens are stored, and their vectors.

Arrays that the host fills are parts of one copy, each wherever it begins: kernels are not compiled for their alignment.

Axes: T tokens, padding included, N requests, G cache groups, R rows of the block tables, W blocks of a row, H elements
of a vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.ops.decode_inputs import LAST_DRAWN, NUM_FIXED_ROWS
from hardpoint_plugin_api import NULL_PAGE

_NULL_PAGE, _LAST_DRAWN, _FIXED = tl.constexpr(NULL_PAGE), tl.constexpr(LAST_DRAWN), tl.constexpr(NUM_FIXED_ROWS)
_TOKENS, _MOST_PARTS = 512, 32
_BLOCKS = 1024
_ELEMENTS = 1024


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "parts"],
    do_not_specialize_on_alignment=["positions_ptr", "rows_ptr", "starts_ptr", "slots_ptr"],
)
def slot_mapping_kernel(
    positions_ptr,
    rows_ptr,
    starts_ptr,
    tables_ptr,
    slots_ptr,
    num_tokens,
    num_requests,
    parts,
    table_stride,
    block_size,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Every so many blocks of one request's tokens; the program behind the last request has the padding."""
    if BEGIN is not None:
        BEGIN()
    request = tl.program_id(0)
    start = tl.load(starts_ptr + request)
    end = num_tokens
    row = tl.zeros((), tl.int64)
    if request < num_requests:
        end = tl.minimum(tl.load(starts_ptr + request + 1), num_tokens)
        row = tl.load(rows_ptr + request).to(tl.int64)
    for first in range(start + tl.program_id(1) * BLOCK, end, parts * BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < end
        slot = tl.zeros((BLOCK,), tl.int64) + _NULL_PAGE * block_size
        if request < num_requests:
            position = tl.load(positions_ptr + token, mask=inside, other=0)
            page = tl.load(tables_ptr + row * table_stride + position // block_size, mask=inside, other=0)
            slot = page.to(tl.int64) * block_size + position % block_size
        tl.store(slots_ptr + token, slot.to(tl.int32), mask=inside)


@triton.jit(
    do_not_specialize=["rows_stride", "mapping_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "mapping_ptr", "block_table_ptr"],
)
def decode_inputs_kernel(
    rows_ptr,
    last_tokens_ptr,
    tables_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    lengths_ptr,
    block_table_ptr,
    mapping_ptr,
    rows_stride,
    tables_group_stride,
    tables_stride,
    block_table_group_stride,
    block_table_stride,
    mapping_stride,
    block_size,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """One request in one cache group: its page if it begins one, and its row of the block table."""
    if BEGIN is not None:
        BEGIN()
    request = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.load(rows_ptr + request).to(tl.int64)
    length = tl.load(rows_ptr + rows_stride + request)
    position = length - 1
    new_page = tl.load(rows_ptr + (_FIXED + group) * rows_stride + request)
    if group == 0:
        token = tl.load(rows_ptr + 2 * rows_stride + request).to(tl.int64)
        if token == _LAST_DRAWN:
            token = tl.load(last_tokens_ptr + slot)
        tl.store(ids_ptr + request, token)
        tl.store(positions_ptr + request, position.to(tl.int64))
        tl.store(slots_ptr + request, slot)
        tl.store(lengths_ptr + request, length)
    last = position // block_size
    table = tables_ptr + group * tables_group_stride + slot * tables_stride
    page = tl.load(table + last)
    if new_page != _NULL_PAGE:
        page = new_page
        tl.store(table + last, page)
    tl.store(mapping_ptr + group * mapping_stride + request, page * block_size + position % block_size)
    out = block_table_ptr + group * block_table_group_stride + request.to(tl.int64) * block_table_stride
    for first in range(0, last + 1, BLOCK):
        block = first + tl.arange(0, BLOCK)
        pages = tl.load(table + block, mask=block < last, other=0)  # the last one may just be on its way to memory
        tl.store(out + block, tl.where(block == last, page, pages), mask=block <= last)


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embedding_lookup_kernel(ids_ptr, weight_ptr, out_ptr, H, weight_stride, BLOCK: tl.constexpr, BEGIN: tl.constexpr):
    """A block of one token's vector."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(weight_ptr + row * weight_stride + column, mask=column < H, other=0.0)
    tl.store(out_ptr + token * H + column, x, mask=column < H)


_slot_mapping, _decode_inputs = Launcher(slot_mapping_kernel), Launcher(decode_inputs_kernel)
_embedding_lookup = Launcher(embedding_lookup_kernel)


def slot_mapping(
    positions: torch.Tensor,
    request_index: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    """See core's op; one-dimensional inputs must be contiguous."""
    count, requests = positions.shape[0], request_index.shape[0]
    slots = torch.empty(count, dtype=torch.int32, device=positions.device)
    if count:
        parts = min(triton.cdiv(count, _TOKENS), _MOST_PARTS)
        stride, dtypes = block_tables.stride(0), (positions.dtype, request_index.dtype, query_start.dtype)
        key = (dtypes, stride, block_size, positions.get_device()) if aligned(block_tables) else None
        grid = (requests + 1, parts, 1)
        inputs = (positions, request_index, query_start, block_tables)
        _slot_mapping(key, grid, 4, *inputs, slots, count, requests, parts, stride, block_size, _TOKENS)
    return slots


def decode_inputs(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    step: dict[str, torch.Tensor],
    *,
    block_size: int,
) -> None:
    """See core's op; the last axis of each input must be contiguous."""
    count = rows.shape[1]
    if not count:
        return
    block_table, mapping = step["block_table"], step["slot_mapping"]
    buffers = (last_tokens, block_tables, step["ids"], step["positions"], step["slots"], step["seq_lens"])
    strides = (*block_tables.stride()[:2], *block_table.stride()[:2])
    _decode_inputs(
        (strides, block_size, rows.get_device()) if aligned(*buffers) else None,
        (count, block_tables.shape[0], 1),
        4,
        rows,
        *buffers,
        block_table,
        mapping,
        rows.stride(0),
        *strides,
        mapping.stride(0),
        block_size,
        _BLOCKS,
    )


def embedding_lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See core's op; ids must be contiguous."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    size = weight.shape[1]
    out = torch.empty((ids.shape[0], size), dtype=weight.dtype, device=weight.device)
    if out.numel():
        block = min(_ELEMENTS, triton.next_power_of_2(size))
        stride = weight.stride(0)
        key = (ids.dtype, weight.dtype, size, stride, ids.get_device()) if aligned(weight, out) else None
        grid = (ids.shape[0], -(-size // block), 1)
        _embedding_lookup(key, grid, 4, ids, weight, out, size, stride, block)
    return out
