"""The low-rank update of a linear layer, of each token by its own adapter.

Axes: T tokens, S adapter slots, R rank of a slot, K elements of the layer's input, N of its output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str, tokens: int, inputs: int, outputs: int, slots: int, rank: int, *, strided: bool = False
    ) -> Case:
        rows = draw.strided if strided else draw.normal
        a, b = draw.normal(slots, rank, inputs, scale=inputs**-0.5), draw.normal(outputs, slots, rank)
        adapters = (draw.distinct(0, tokens, tokens) + 1) % (slots + 1) - 1  # each slot, and none, where tokens suffice
        return Case(name, (rows(tokens, outputs), rows(tokens, inputs), a, b, adapters.to(torch.int32)))

    yield case("random", 9, 64, 48, 3, 8)
    yield case("one_slot", 5, 32, 32, 1, 16)
    one = torch.ones(1, 1, dtype=dtype, device=device)
    yield Case("one", (one, 3 * one, one[None], 2 * one[None], torch.zeros(1, dtype=torch.int32, device=device)))
    yield case("odd", 7, 33, 129, 5, 3)
    yield case("strided", 6, 40, 24, 2, 4, strided=True)
    yield case("long", 3, 4096, 64, 2, 16)
    yield case("wide", 3, 64, 4096, 2, 64)
    yield case("many_tokens", 300, 48, 64, 4, 8)
    yield case("many_slots", 40, 32, 32, 33, 4)
    yield case("empty", 0, 16, 16, 2, 4)
    y, x, a, b, adapters = case("", 8, 32, 16, 3, 4).args
    yield Case("one_adapter", (y, x, a, b, torch.full_like(adapters, 2)))
    yield Case("empty_slot", (y, x, a, b * torch.tensor([[1], [0], [1]], device=device), adapters))
    yield Case("non_finite_input", (y, draw.with_nan(8, 32), a, b, torch.arange(8, device=device).int() % 4 - 1))
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", 2, width, width, 1, 8)


_MOST_WIDE = 1 << 23
"""How many float32 numbers of tokens the reference holds at a time: a long step's would take as much as weights do."""


@custom_op(cases=_cases, errors=ErrorModel(), mutates=["y"])
def add_lora(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor) -> None:
    """Add to each row of y [T, N] the update of its adapter: ``(x @ a[slot].T) @ b[:, slot].T`` (arXiv:2106.09685).

    x is [T, K], a [S, R, K], b [N, S, R]; ``adapters`` int32 [T] has each token's slot, -1 for a token whose row of y
    stays as it is. Rows of x and y may lie apart. Sums, the middle [T, R] and y plus its update are float32 (float64
    where x is), rounded once; a kernel may round the middle to x's dtype, once, as matrix units want it. The numbers of
    one slot have no say in tokens of another one, as long as a and b are finite. Mutates ``y``.
    """
    slots, rank, inputs = a.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    down, up = a.flatten(0, 1).to(wide).T, b.flatten(1).to(wide).T
    slot = torch.arange(slots, device=x.device).repeat_interleave(rank)
    step = max(1, _MOST_WIDE // (inputs + slots * rank + y.shape[1]))
    for start in range(0, y.shape[0], step):
        rows = slice(start, start + step)
        middle = x[rows].to(wide) @ down
        middle = middle.masked_fill(adapters[rows, None] != slot, 0.0)
        y[rows] = (y[rows].to(wide) + middle @ up).to(y.dtype)


def row_by_row(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor) -> None:
    """``add_lora``, each row alone: a product of several rows may sum in another order."""
    for row in range(y.shape[0]):
        one = slice(row, row + 1)
        add_lora.reference(y[one], x[one], a, b, adapters[one])
