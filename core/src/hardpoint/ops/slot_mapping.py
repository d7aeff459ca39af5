"""Where a step's tokens are stored: from positions to slots of the paged cache, through the block tables.

Axes: T tokens of the step, padding included, N requests of the step, R rows of the block tables, W blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import NULL_PAGE


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, counts: Sequence[int], starts: Sequence[int], block: int, rows: int, padding: int = 0) -> Case:
        positions = [p for start, count in zip(starts, counts, strict=True) for p in range(start, start + count)]
        width = max(positions, default=0) // block + 2
        return Case(
            name,
            (
                torch.tensor(positions + [0] * padding, dtype=torch.int64, device=device),
                draw.distinct(0, rows, len(counts)).to(torch.int32),
                torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
                draw.distinct(1, 1 + rows * width, rows * width).to(torch.int32).view(rows, width),
            ),
            {"block_size": block},
        )

    yield case("random", draw.integers(1, 60, 6).tolist(), draw.integers(0, 60, 6).tolist(), 16, 8)
    yield case("decodes", [1] * 7, [0, 1, 15, 16, 17, 200, 31], 16, 9)
    yield case("prompts", [33, 5, 16], [0, 0, 0], 16, 3)
    yield case("chunks", [8, 3, 40], [24, 13, 100], 16, 5)
    yield case("mixed", [1, 1, 9, 30], [44, 0, 7, 1], 5, 8)
    yield case("padded", [1, 1, 6], [3, 50, 10], 16, 4, padding=8)
    yield case("only_padding", [], [], 16, 2, padding=4)
    yield case("blocks_of_one", [1, 4], [9, 2], 1, 2)
    yield case("many_requests", [1] * 300, list(range(300)), 16, 512)
    yield case("one", [1], [0], 1, 1)
    yield case("empty", [], [], 16, 2)


def _allocate(
    positions: torch.Tensor,
    request_index: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    return positions.new_empty(positions.shape, dtype=torch.int32)


@custom_op(
    cases=_cases,
    errors=ErrorModel(exact=True),
    allocate=_allocate,
    has_rows=False,  # tokens belong to requests, whose starts are one more than they
)
def slot_mapping(
    positions: torch.Tensor,
    request_index: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    """positions int64 [T] -> int32 [T]: ``page * block_size + offset`` of each token, in its request's pages.

    The i-th request has the tokens from ``query_start[i]`` (int32 [N+1]) up to the next one's, and the pages of row
    ``request_index[i]`` (int32 [N]) of ``block_tables`` (int32 [R, W]). Tokens behind the last request are padding:
    they get the null page's first slot.
    """
    token = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    request = torch.bucketize(token, query_start[1:], right=True)
    padding = request >= request_index.shape[0]
    if request_index.shape[0] == 0:
        return torch.full_like(token, NULL_PAGE * block_size)
    row = request_index[request.clamp(max=request_index.shape[0] - 1)].long()
    slots = block_tables[row, positions // block_size] * block_size + positions % block_size
    return slots.masked_fill(padding, NULL_PAGE * block_size).to(torch.int32)
