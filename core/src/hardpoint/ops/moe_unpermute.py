"""Experts' results back in the order of the tokens, weighted and summed: after a grouped matmul.

Axes: T tokens, K experts per token, P rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, rows: torch.Tensor, tokens: int, top_k: int, absent: int = 0) -> Case:
        places = draw.distinct(0, tokens * top_k, tokens * top_k)
        places = torch.where(places < tokens * top_k - absent, places, -1).view(tokens, top_k)
        return Case(name, (rows, places, draw.floats(tokens, top_k)))

    def unread(rows: torch.Tensor, count: int) -> torch.Tensor:
        rows[rows.shape[0] - count :] = float("nan")
        return rows

    yield case("random", draw.normal(18, 64), 9, 2)
    yield case("decode", draw.normal(8, 512), 1, 8)
    yield case("one_expert", draw.normal(7, 33), 7, 1)
    yield case("absent", unread(draw.normal(27, 64), 10), 9, 3, absent=10)
    yield case("all_absent", unread(draw.normal(8, 32), 8), 4, 2, absent=8)
    yield case("many", draw.normal(1200, 32), 300, 4)
    yield case("strided", draw.strided(18, 64), 9, 2)
    first = draw.normal(24, 64, scale=100.0)
    rows = torch.stack([first, draw.normal(24, 64) - first], dim=1).flatten(0, 1)  # partial sums are far above the sum
    yield Case("cancelling", (rows, torch.arange(48, device=device).view(6, 8), torch.ones(6, 8, device=device)))
    yield case("large", draw.normal(18, 64, scale=1e4), 9, 2)
    yield case("non_finite", draw.with_non_finite(8, 32), 4, 2)
    yield case("one", draw.normal(1, 1), 1, 1)
    yield case("empty", draw.normal(0, 64), 0, 2)
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", draw.normal(4, width), 2, 2)


def _allocate(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(places.shape[0], rows.shape[-1])


@custom_op(cases=_cases, errors=ErrorModel(), allocate=_allocate)
def moe_unpermute(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rows [P, H], places int64 [T, K], weights float32 [T, K] -> [T, H] in the rows' dtype.

    Each token gets the sum of its experts' rows, each times its weight, added up in float32 or wider in the order of
    its experts, and rounded once. Where ``places`` is -1 nothing is added, and no row is read; rows that no place names
    may hold anything. A token without any expert here gets zeros.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(places.shape[0], rows.shape[-1], dtype=wide, device=rows.device)
    if rows.shape[0] == 0:
        return total.to(rows.dtype)
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        part = rows[place.clamp(min=0)].to(wide) * weight.to(wide).unsqueeze(-1)
        total = total + part.masked_fill((place < 0).unsqueeze(-1), 0.0)
    return total.to(rows.dtype)
