"""The indexer of sparse attention in compiled kernels (``csrc/kernels/sparse_index.h``).

Axes: T tokens, N requests, H index heads, D index head size, G groups of D, S positions.
"""

from __future__ import annotations

import torch

from hardpoint_cpu import native
from hardpoint_cpu.native_attention import CODES
from hardpoint_cpu.ops.arguments import misfit

Cache = dict[str, torch.Tensor]


def store_index_keys(k: torch.Tensor, cache: Cache, slot_mapping: torch.Tensor) -> None:
    """See core's op. Nothing is stored to slots of the null page. Raises ConfigError for arguments that do not fit."""
    keys, scales = cache["index_key"], cache.get("index_key_scale")
    _, block, groups, size = keys.shape
    if k.shape[1:] != (groups * size,):
        raise misfit("store_index_keys", "k", k, k.dtype, ("T", groups * size))
    if slot_mapping.dtype != torch.int32:
        raise misfit("store_index_keys", "slot_mapping", slot_mapping, torch.int32, ("T",))
    if not k.shape[0]:
        return
    rows, slots = native.rows(k), slot_mapping.contiguous()
    native.run(
        native.number_for("store_index_keys", k.dtype),
        *(rows.data_ptr(), rows.stride(0), keys.data_ptr(), keys.stride(0), *_scales(scales)),
        *(k.shape[0], groups, size, block, _code(keys), slots.data_ptr()),
    )


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See core's op. Raises ConfigError for arguments that do not fit."""
    keys, scales = cache["index_key"], cache.get("index_key_scale")
    _, block, groups, size = keys.shape
    tokens, heads = q.shape[:2]
    if q.shape[2] != groups * size:
        raise misfit("index_scores", "q", q, q.dtype, ("T", "H", groups * size))
    if weights.dtype != torch.float32 or weights.shape != (tokens, heads):
        raise misfit("index_scores", "weights", weights, torch.float32, (tokens, heads))
    for name, x, dtype in (
        ("block_table", block_table, torch.int32),
        ("query_start", query_start, torch.int32),
        ("positions", positions, torch.int64),
    ):
        if x.dtype != dtype:
            raise misfit("index_scores", name, x, dtype, ("...",))
    places = block_table.shape[1] * block
    out = torch.empty(tokens, places, dtype=torch.float32)
    if not out.numel():
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    weights, table = native.rows(weights), native.rows(block_table)
    starts, positions = query_start.contiguous(), positions.contiguous()
    native.run(
        native.number_for("index_scores", keys.dtype),
        *(q.data_ptr(), q.stride(0), q.stride(1), _code(q), weights.data_ptr(), weights.stride(0)),
        *(keys.data_ptr(), keys.stride(0), *_scales(scales)),
        *(table.data_ptr(), table.stride(0), starts.data_ptr(), positions.data_ptr()),
        *(block_table.shape[0], tokens, out.data_ptr(), places, heads, groups, size, block),
    )
    return out


def topk_positions(scores: torch.Tensor, positions: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """See core's op. Raises ConfigError for arguments that do not fit."""
    for name, x, dtype in (("scores", scores, torch.float32), ("positions", positions, torch.int64)):
        if x.dtype != dtype:
            raise misfit("topk_positions", name, x, dtype, ("T", "..."))
    out = torch.empty(scores.shape[0], top_k, dtype=torch.int32)
    if out.numel():
        rows, positions = native.rows(scores), positions.contiguous()
        native.run(
            native.kernel_number("topk_positions"),
            *(rows.data_ptr(), rows.stride(0), positions.data_ptr(), out.data_ptr()),
            *(scores.shape[0], scores.shape[1], top_k),
        )
    return out


def _code(x: torch.Tensor) -> int:
    return CODES[str(x.dtype).removeprefix("torch.")]


def _scales(scales: torch.Tensor | None) -> tuple[int | None, int]:
    """The address of scales and their stride from page to page; none where elements have none."""
    return (None, 0) if scales is None else (scales.data_ptr(), scales.stride(0))
