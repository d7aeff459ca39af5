"""The pages that a step reads, one request's behind another's: what libraries with a compressed index of pages take.

Axes: N requests, B blocks of the widest request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PAGES = 1024
"""Pages that a program copies."""


# One variant for all: parts of packed arrays are now aligned, now not, and nothing is to be compiled between steps.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "first_ptr", "out_ptr"],
)
def _page_indices(table_ptr, table_stride, starts_ptr, first_ptr, out_ptr, PAGES: tl.constexpr):
    request = tl.program_id(0)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    row_ptr = table_ptr + request.to(tl.int64) * table_stride + tl.load(first_ptr + request)
    tl.store(out_ptr + start + page, tl.load(row_ptr + page, mask=page < count), mask=page < count)


def page_indices(
    block_table: torch.Tensor, starts: torch.Tensor, first: torch.Tensor, most: int, out: torch.Tensor
) -> None:
    """Write the pages of request i, from its block ``first[i]`` on, to ``out[starts[i] : starts[i + 1]]``.

    ``block_table`` [N, B], ``starts`` [N + 1], ``first`` [N] and ``out`` are int32; ``most`` is the largest number of
    pages of a request. Mutates ``out`` alone; the host waits for nothing.
    """
    grid = (block_table.shape[0], -(-most // _PAGES))
    _page_indices[grid](block_table, block_table.stride(0), starts, first, out, PAGES=_PAGES)
