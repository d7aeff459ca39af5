"""Tokens sorted by expert: before a grouped matmul.

Axes: T tokens, K experts per token, P = T * K pairs of token and expert, E experts of this rank, G of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel

Permuted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_ids(draw: Draw, tokens: int, top_k: int, experts: int, absent: float = 0.0) -> torch.Tensor:
    """Expert ids int32 [T, K], different in a row; a share of about ``absent`` is -1."""
    rows = [draw.distinct(0, experts, top_k) for _ in range(tokens)]
    ids = torch.stack(rows) if rows else draw.integers(0, experts, 0, top_k)
    away = torch.rand(ids.shape, generator=draw.generator).to(draw.device) < absent
    return ids.masked_fill(away, -1).to(torch.int32)


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, x: torch.Tensor, ids: torch.Tensor, experts: int, *expert_map: torch.Tensor) -> Case:
        return Case(name, (x, ids, *expert_map), {"num_experts": experts})

    yield case("random", draw.normal(9, 64), random_ids(draw, 9, 2, 8), 8)
    yield case("absent", draw.normal(9, 64), random_ids(draw, 9, 3, 8, absent=0.4), 8)
    yield case("all_absent", draw.normal(5, 32), torch.full((5, 2), -1, dtype=torch.int32, device=device), 4)
    yield case("idle_experts", draw.normal(5, 32), random_ids(draw, 5, 2, 3) + 4, 60)
    yield case("one_expert", draw.normal(6, 32), torch.full((6, 1), 2, dtype=torch.int32, device=device), 4)
    yield case("decode", draw.normal(1, 64), random_ids(draw, 1, 8, 128), 128)
    yield case("many", draw.normal(600, 33), random_ids(draw, 600, 4, 16), 16)
    yield case("strided", draw.strided(6, 64), random_ids(draw, 6, 4, 8)[:, ::2], 8)
    half = torch.full((8,), -1, dtype=torch.int32, device=device)
    half[draw.distinct(0, 8, 4)] = torch.arange(4, dtype=torch.int32, device=device)
    yield case("mapped", draw.normal(9, 64), random_ids(draw, 9, 3, 8), 4, half)
    yield case("mapped_absent", draw.normal(9, 64), random_ids(draw, 9, 3, 8, absent=0.3), 4, half)
    yield case("non_finite", draw.with_non_finite(4, 32), random_ids(draw, 4, 2, 4), 4)
    yield case("one", draw.normal(1, 1), random_ids(draw, 1, 1, 1), 1)
    yield case("empty", draw.normal(0, 64), random_ids(draw, 0, 2, 8), 8)
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", draw.normal(2, width), random_ids(draw, 2, 2, 8), 8)


def _allocate(
    x: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None = None, *, num_experts: int
) -> Permuted:
    rows = x.new_empty(ids.numel(), x.shape[-1])
    return rows, ids.new_empty(num_experts + 1, dtype=torch.int64), ids.new_empty(ids.shape, dtype=torch.int64)


@custom_op(cases=_cases, errors=ErrorModel(exact=True), allocate=_allocate)
def moe_permute(
    x: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None = None, *, num_experts: int
) -> Permuted:
    """x [T, H], ids int32 [T, K] -> (rows [P, H] in x's dtype, starts int64 [E + 1], places int64 [T, K]).

    ``rows`` holds each token once for each of its experts: those of expert e from ``starts[e]`` to ``starts[e + 1]``,
    in the order of the tokens. ``places`` says where the row of a pair is. E is ``num_experts``, those of this rank.
    A pair whose id is -1 is not on this rank: its place is -1, and behind ``starts[E]`` rows are zeros, so that their
    number needs no exchange with the host. ``expert_map`` int32 [G] says what number on this rank (-1: none) the
    experts have that ids count over all ranks; without it ids count this rank's, and are not copied.
    Places are 64-bit, as P * H may be more than 2^31 elements.
    """
    local = ids if expert_map is None else torch.where(ids < 0, ids, expert_map[ids.clamp(min=0)])
    pairs, starts, places = sort_pairs(local, num_experts)
    here = torch.arange(pairs.shape[0], device=ids.device) < starts[-1]
    return torch.where(here.unsqueeze(-1), x[pairs // ids.shape[1]], x.new_zeros(())), starts, places


def sort_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [T, K] of this rank's experts -> (pairs int64 [P], by place; starts [E + 1] and places [T, K] as above).

    A pair has the number ``token * K + k``. Pairs whose id is -1 come last.
    """
    count = ids.numel()
    sorted_ids, order = ids.reshape(-1).sort(stable=True)  # here they come first
    starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device))
    absent, numbers = starts[0], torch.arange(count, device=ids.device)
    places = torch.empty_like(numbers)
    places[order] = numbers - absent
    return order[(numbers + absent) % count], starts - absent, places.clamp(min=-1).view(ids.shape)
