"""The positions of the highest scores of each row.

Axes: T rows, S scores of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, scores: torch.Tensor, top_k: int, *positions: int) -> Case:
        at = torch.tensor(positions) if positions else draw.integers(0, max(1, scores.shape[1]), scores.shape[0])
        return Case(name, (scores.float(), at.to(device)), {"top_k": top_k})

    few = draw.integers(-2, 3, 9, 300).float()
    yield case("random", draw.normal(7, 500), 64)
    yield case("ties", few, 37)
    yield case("all_equal", torch.zeros(5, 70, device=device), 9, 69, 8, 9, 7, 0)
    yield case("k_at_the_edges", draw.normal(5, 40), 8, 6, 7, 8, 9, 39)
    yield case("k_of_one", draw.normal(4, 33), 1)
    yield case("k_above_all", draw.normal(4, 33), 100)
    yield case("a_tie_across_tiles", (draw.integers(0, 2, 3, 5000) * 2).float(), 2048, 4999, 2047, 2600)
    zeros = torch.zeros(3, 64, device=device)
    yield case("zeros_of_both_signs", torch.where(draw.floats(3, 64) < 0.5, zeros, -zeros), 20, 63, 40, 30)
    yield case("infinities", few.where(few != 2, float("inf")).where(few != -2, float("-inf")), 80)
    yield case("nan", draw.with_nan(3, 50), 5, 49, 48, 47)
    garbage = draw.normal(3, 90)
    garbage[:, 45:] = float("nan")
    yield case("garbage_behind", garbage, 16, 44, 15, 20)
    yield case("low", draw.normal(4, 200) - 1e30, 50)
    yield case("subnormal", draw.normal(4, 200, scale=1e-40), 50)
    yield case("strided", draw.normal(6, 300)[:, 7:150], 31)
    yield case("empty", draw.normal(0, 40), 4)


def _allocate(scores: torch.Tensor, positions: torch.Tensor, *, top_k: int) -> torch.Tensor:
    return scores.new_empty(scores.shape[0], top_k, dtype=torch.int32)


@custom_op(cases=_cases, errors=ErrorModel(exact=True), allocate=_allocate, static=["top_k"])
def topk_positions(scores: torch.Tensor, positions: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """scores float32 [T, S] -> int32 [T, top_k]: where each row's highest scores stand, in rising order, then -1.

    Of row t, only the scores up to ``positions[t]`` (int64 [T], below S) count. Of no more than ``top_k``, all are
    chosen. Of equal scores the lower position comes first; 0 and -0 are equal, and a NaN is above all numbers.
    """
    size = scores.shape[1]
    there = torch.arange(size, device=scores.device) <= positions[:, None]
    # A score that does not count stands behind all that do, also behind those of -inf: sorting is stable.
    order = torch.where(there, scores, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    found = order.masked_fill(order > positions[:, None], size).sort(dim=-1).values
    found = found.masked_fill(found == size, -1).to(torch.int32)
    return torch.nn.functional.pad(found, (0, top_k - found.shape[1]), value=-1)
