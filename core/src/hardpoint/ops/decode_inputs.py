"""From the few numbers that the host knows of a decode step to all that its model reads.

Axes: N rows of the step, padding included, G cache groups, R slots of requests, W blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import NULL_PAGE

LAST_DRAWN = -1
"""In place of a token: the one that was last drawn for the slot, which the device alone knows."""
NUM_FIXED_ROWS = 3
"""Slot, length, token; a new page for each cache group follows."""


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, lengths: Sequence[int], groups: int = 1, block: int = 16, padding: int = 0) -> Case:
        slots, width = len(lengths) + 3, max([*lengths, 1]) // block + 2
        length = torch.tensor([*lengths, *[1] * padding], dtype=torch.int64, device=device)
        slot = draw.distinct(0, slots, len(lengths))
        slot = torch.cat([slot, torch.full((padding,), slots, dtype=torch.int64, device=device)])
        token = draw.integers(-1, 5, len(length)).clamp(max=0) * draw.integers(0, 2, len(length))
        token = torch.where(token < 0, LAST_DRAWN, draw.integers(0, 1000, len(length)))
        begins = (length % block == 1) & (slot < slots) if block > 1 else slot < slots
        pages = [torch.where(begins, draw.integers(5, 99, len(length)), NULL_PAGE) for _ in range(groups)]
        tables = draw.integers(1, 500, groups, slots + 1, width).to(torch.int32)
        tables[:, slots] = NULL_PAGE
        return Case(
            name,
            (
                torch.stack([slot, length, token, *pages]).to(torch.int32),
                draw.integers(0, 1000, slots + 1),
                tables,
                allocate_step(groups, len(length), width, device),
            ),
            {"block_size": block},
        )

    yield case("random", draw.integers(1, 300, 9).tolist(), groups=2)
    yield case("edges", [1, 15, 16, 17, 31, 32, 33, 49])
    yield case("padded", [5, 17, 33], groups=3, padding=5)
    yield case("blocks_of_one", [1, 2, 7], block=1)
    yield case("long", [40_000, 3], block=16)
    yield case("many", list(range(1, 300)), groups=2, padding=3)
    yield case("one", [1])
    yield case("empty", [])


def allocate_step(groups: int, rows: int, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors that the op writes to, full of zeros: see there."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        "ids": zeros(rows),
        "positions": zeros(rows),
        "slots": zeros(rows),
        "seq_lens": zeros(rows, dtype=torch.int32),
        "block_table": zeros(groups, rows, width, dtype=torch.int32),
        "slot_mapping": zeros(groups, rows, dtype=torch.int32),
    }


@custom_op(
    cases=_cases,
    errors=ErrorModel(exact=True),
    mutates=["block_tables", "step"],
    has_rows=False,  # the first axis of ``rows`` tells slots from lengths and tokens
)
def decode_inputs(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    step: dict[str, torch.Tensor],
    *,
    block_size: int,
) -> None:
    """Fill ``step``, the arrays of a step in which every request has one token.

    ``rows`` int32 [3 + G, N] holds each request's slot, its length with this token, the token itself (LAST_DRAWN: that
    of ``last_tokens``, int64 [R]), and for each cache group the page that begins with this token (the null page: none
    does). No slot stands twice but that of padding, which gets no page. New pages are put into ``block_tables``, int32
    [G, R, W], where the token's position says.

    ``step`` has ids, positions and slots int64 [N], seq_lens int32 [N], slot_mapping int32 [G, N], and block_table
    int32 [G, N, W], of which the blocks of each request's own length are written and the rest is left as it is.
    Mutates ``block_tables`` and ``step`` alone.
    """
    slots, lengths, tokens = (row.long() for row in rows[:NUM_FIXED_ROWS])
    positions = lengths - 1
    step["positions"].copy_(positions)
    step["slots"].copy_(slots)
    step["seq_lens"].copy_(lengths)
    step["ids"].copy_(torch.where(tokens == LAST_DRAWN, last_tokens[slots], tokens))
    blocks = positions // block_size
    new_pages = rows[NUM_FIXED_ROWS:]
    kept = block_tables[:, slots, blocks]
    block_tables[:, slots, blocks] = torch.where(new_pages == NULL_PAGE, kept, new_pages)
    pages = block_tables[:, slots, blocks]
    step["slot_mapping"].copy_(pages * block_size + positions % block_size)
    used = torch.arange(block_tables.shape[2], device=rows.device) <= blocks[:, None]
    step["block_table"].copy_(torch.where(used, block_tables[:, slots], step["block_table"]))
