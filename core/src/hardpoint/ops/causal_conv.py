"""A short causal convolution of each channel over the tokens of a sequence, whose last inputs are kept as a state.

Axes: T tokens, N requests, C channels, W width of the filter, P pages of states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hardpoint.ops.activation import activation_function
from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import NULL_PAGE

Piece = tuple[int, int]
"""Of a request in a step: its tokens, and the tokens of its sequence up to the last of these."""


def random_pages(draw: Draw, pieces: Sequence[Piece], padding: int = 0) -> tuple[int, torch.Tensor]:
    """The number of pages, and a page for each of ``pieces``, int64; behind them the null page, ``padding`` times."""
    count = len(pieces) + NULL_PAGE + 3
    own = draw.distinct(NULL_PAGE + 1, count, len(pieces))
    return count, torch.cat([own, own.new_full((padding,), NULL_PAGE)])


def batch_arrays(draw: Draw, pieces: Sequence[Piece], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``query_start`` and ``seq_lens`` of a batch, int32; behind ``pieces`` are ``padding`` requests of one token."""
    every = [*pieces, *[(1, 1)] * padding]
    starts = torch.tensor([0, *(tokens for tokens, _ in every)]).cumsum(0).to(torch.int32)
    return starts.to(draw.device), torch.tensor([total for _, total in every], dtype=torch.int32, device=draw.device)


def fill_known(states: torch.Tensor, pages: torch.Tensor, pieces: Sequence[Piece], values: torch.Tensor) -> None:
    """Write ``values`` [N, ...] to the pages of requests that had tokens before this step. Mutates ``states``."""
    for page, (tokens, total), value in zip(pages.tolist(), pieces, values, strict=False):
        if total > tokens:
            states[page] = value


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str,
        pieces: Sequence[Piece],
        channels: int = 24,
        width: int = 4,
        *,
        bias: bool = False,
        activation: str = "silu",
        padding: int = 0,
    ) -> Case:
        count, pages = random_pages(draw, pieces, padding)
        buffer = torch.full((count, (width - 1) * channels + 8), float("nan"), dtype=dtype, device=device)
        states = buffer[:, : (width - 1) * channels].view(count, width - 1, channels)  # pages hold other planes, too
        fill_known(states, pages, pieces, draw.normal(len(pieces), width - 1, channels))
        x = draw.strided(sum(tokens for tokens, _ in pieces) + padding, channels)
        weight = draw.normal(channels, width)
        arrays = batch_arrays(draw, pieces, padding)
        args = (x, weight, draw.normal(channels) if bias else None, states, pages, *arrays)
        return Case(name, args, {"activation": activation}, {"activation": activation})

    yield case("decodes", [(1, 9), (1, 1), (1, 2), (1, 300)])
    yield case("prompts", [(5, 5), (70, 70), (3, 3), (2, 2)], 130)
    yield case("chunks", [(6, 40), (1, 41), (2, 3), (3, 5)], 33)
    yield case("mixed", [(1, 17), (1, 1), (9, 9), (4, 20)], 64, bias=True)
    yield case("wide_filter", [(1, 30), (1, 3), (2, 4), (11, 11)], 17, 9, bias=True)
    yield case("narrow_filter", [(1, 8), (4, 4)], 40, 2)
    yield case("other_activation", [(3, 3), (1, 5)], 19, activation="gelu")
    yield case("padded", [(1, 4), (1, 70)], padding=2)
    yield case("many_channels", [(1, 6), (3, 9)], 4096)
    yield case("one", [(1, 1)], 1)
    yield case("empty", [])
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", [(1, 6), (2, 2)], width)


def _allocate(x: torch.Tensor, *rest: object, activation: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@custom_op(
    cases=_cases,
    errors=ErrorModel(scale="row", finest=2.0**-20, ignore_null_page=("states",)),
    allocate=_allocate,
    mutates=["states"],
    has_rows=False,
)
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    pages: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    activation: str,
) -> torch.Tensor:
    """x [T, C], weight [C, W], bias [C] -> [T, C] in x's dtype: ``activation(bias + sum_j weight[:, W-1-j] x[t-j])``.

    Inputs before the first token of a sequence are zero. ``states`` [P, W-1, C]: the inputs of a sequence's last W-1
    tokens, oldest first, in the page of its request; undefined before the first token. Mutated: afterwards they end
    with the last token of this step. ``pages`` int64 [N] differ, but for the null page, whose state nobody reads.
    ``query_start`` int32 [N+1] and ``seq_lens`` int32 [N] are as in AttentionBatch; a request whose tokens are all in
    this step begins here. Rows of x behind the last request have undefined results. Computed in float32 or wider.
    """
    if not x.shape[0]:
        return x.new_empty(x.shape)
    starts, counts = query_start[:-1].long(), (query_start[1:] - query_start[:-1]).long()
    before, kept = _history(states, pages, seq_lens.long() == counts), weight.shape[1] - 1
    tokens = torch.arange(x.shape[0], device=x.device)
    requests = torch.searchsorted(query_start[1:].contiguous(), tokens.to(torch.int32), right=True)
    requests = requests.clamp(max=len(pages) - 1)
    offsets = tokens - starts[requests]
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_zeros(x.shape, dtype=wide) if bias is None else bias.to(wide).expand(x.shape)
    for j in range(kept + 1):
        old = before[requests, (kept + offsets - j).clamp(0, kept - 1)]
        inputs = torch.where((offsets >= j)[:, None], x[(tokens - j).clamp(min=0)], old.to(x.dtype))
        y = y + weight[:, kept - j].to(wide) * inputs.to(wide)
    last = counts[:, None] - kept + torch.arange(kept, device=x.device)  # offsets of the inputs to keep, [N, W-1]
    new = x[(starts[:, None] + last).clamp(0, x.shape[0] - 1)].to(states.dtype)
    old = before.gather(1, (last + kept).clamp(max=kept - 1)[..., None].expand_as(before))
    states[pages] = torch.where((last >= 0)[..., None], new, old)
    return activation_function(activation)(y).to(x.dtype)


def _history(states: torch.Tensor, pages: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """The states of requests, [N, ...]: zero for those that begin."""
    return states[pages].masked_fill(begins.view(-1, *[1] * (states.dim() - 1)), 0.0)
