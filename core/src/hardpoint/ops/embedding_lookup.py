"""Token ids to vectors: rows of an embedding.

Axes: V rows, H elements of each, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, rows: int, size: int, tokens: int) -> Case:
        return Case(name, (draw.integers(0, rows, tokens), draw.normal(rows, size)))

    yield case("random", 100, 64, 9)
    yield case("one", 1, 1, 1)
    yield case("odd", 33, 129, 5)
    yield case("long", 17, 8192, 3)
    yield case("many_rows", 50_000, 16, 40)
    yield case("many_tokens", 50, 32, 3000)
    yield case("empty", 10, 64, 0)
    yield Case("repeated", (torch.full((6,), 3, dtype=torch.int64, device=device), draw.normal(5, 64)))
    ends = torch.tensor([0, 99, 0, 99], dtype=torch.int64, device=device)
    yield Case("first_and_last", (ends, draw.normal(100, 64)))
    yield Case("non_finite", (draw.integers(0, 8, 20), draw.with_non_finite(8, 64)))
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", 5, width, 3)


def _allocate(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1])


@custom_op(cases=_cases, errors=ErrorModel(exact=True), allocate=_allocate)
def embedding_lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """ids int64 [T], each from 0 to V - 1, weight [V, H] -> [T, H]: a copy of those rows."""
    return weight[ids]
