"""Inputs of a step: vectors of its tokens, and the slots that they are stored at."""

from __future__ import annotations

import torch

from hardpoint_cpu import native
from hardpoint_cpu.ops.arguments import misfit
from hardpoint_plugin_api import NULL_PAGE


def embedding_lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See core's op. Raises ConfigError for ids of another dtype or shape."""
    if ids.dtype != torch.int64 or ids.ndim != 1 or not ids.is_contiguous():
        raise misfit("embedding_lookup", "ids", ids, torch.int64, ("T",))
    weight = native.rows(weight)
    out = torch.empty((ids.shape[0], weight.shape[1]), dtype=weight.dtype)
    if out.numel():
        native.run(
            native.kernel_number("take_rows"),
            weight.data_ptr(),
            ids.data_ptr(),
            out.data_ptr(),
            ids.shape[0],
            out.shape[1] * out.element_size(),
            weight.stride(0) * out.element_size(),
        )
    return out


def slot_mapping(
    positions: torch.Tensor,
    request_index: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    """See core's op. Raises ConfigError for arguments of another dtype or shape."""
    requests = request_index.shape[0]
    for name, x, dtype, least in (
        ("positions", positions, torch.int64, 0),
        ("request_index", request_index, torch.int32, 0),
        ("query_start", query_start, torch.int32, requests + 1),
    ):
        if x.dtype != dtype or x.ndim != 1 or x.shape[0] < least or not x.is_contiguous():
            raise misfit("slot_mapping", name, x, dtype, (f"at least {least}",))
    if block_tables.dtype != torch.int32 or block_tables.ndim != 2 or block_tables.stride(1) != 1:
        raise misfit("slot_mapping", "block_tables", block_tables, torch.int32, ("R", "W"))
    slots = torch.empty(positions.shape, dtype=torch.int32)
    if positions.shape[0]:
        native.run(
            native.kernel_number("slot_mapping"),
            positions.data_ptr(),
            request_index.data_ptr(),
            query_start.data_ptr(),
            block_tables.data_ptr(),
            slots.data_ptr(),
            positions.shape[0],
            requests,
            block_tables.stride(0),
            block_size,
            NULL_PAGE * block_size,
        )
    return slots


def keep_tokens(last_tokens: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """See core's op. Raises ConfigError for arguments of another dtype or shape."""
    for name, x, count in (("last_tokens", last_tokens, None), ("slots", slots, None), ("tokens", tokens, len(slots))):
        if x.dtype != torch.int64 or x.ndim != 1 or not x.is_contiguous() or count not in (None, x.shape[0]):
            raise misfit("keep_tokens", name, x, torch.int64, ("N",))
    if slots.shape[0]:
        native.run(
            native.kernel_number("keep_tokens"),
            last_tokens.data_ptr(),
            slots.data_ptr(),
            tokens.data_ptr(),
            slots.shape[0],
        )


_FIXED_ROWS = 3
"""Of decode_inputs' rows: slot, length, token."""


def decode_inputs(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    step: dict[str, torch.Tensor],
    *,
    block_size: int,
) -> None:
    """See core's op. Raises ConfigError for arguments of another dtype or shape."""
    groups, _, width = block_tables.shape
    count = rows.shape[1]
    for name, x, dtype, shape in (
        ("rows", rows, torch.int32, (_FIXED_ROWS + groups, count)),
        ("last_tokens", last_tokens, torch.int64, (block_tables.shape[1],)),
        ("block_tables", block_tables, torch.int32, block_tables.shape),
        ("ids", step["ids"], torch.int64, (count,)),
        ("positions", step["positions"], torch.int64, (count,)),
        ("slots", step["slots"], torch.int64, (count,)),
        ("seq_lens", step["seq_lens"], torch.int32, (count,)),
        ("block_table", step["block_table"], torch.int32, (groups, count, width)),
        ("slot_mapping", step["slot_mapping"], torch.int32, (groups, count)),
    ):
        if x.dtype != dtype or x.shape != shape or (x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1):
            raise misfit("decode_inputs", name, x, dtype, shape)
    block_table, mapping = step["block_table"], step["slot_mapping"]
    if count:
        native.run(
            native.kernel_number("decode_inputs"),
            rows.data_ptr(),
            last_tokens.data_ptr(),
            block_tables.data_ptr(),
            step["ids"].data_ptr(),
            step["positions"].data_ptr(),
            step["slots"].data_ptr(),
            step["seq_lens"].data_ptr(),
            block_table.data_ptr(),
            mapping.data_ptr(),
            count,
            groups,
            width,
            block_size,
            rows.stride(0),
            *block_tables.stride()[:2],
            *block_table.stride()[:2],
            mapping.stride(0),
        )
