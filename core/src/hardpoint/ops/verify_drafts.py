"""Which of the proposed tokens are right: speculative decoding, whoever drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import NO_DRAFT


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, counts: Sequence[int], alike: int = 3) -> Case:
        """Requests of so many rows; draws and drafts are among ``alike`` tokens."""
        row_start = torch.tensor([0, *counts], device=device).cumsum(0)
        drafts = draw.integers(0, alike, sum(counts))
        drafts[row_start[1:] - 1] = NO_DRAFT
        return Case(name, (draw.integers(0, alike, sum(counts)), drafts, row_start.to(torch.int32)), {})

    yield case("random", draw.integers(1, 6, 40).tolist())
    yield case("right", [5, 1, 2, 9], alike=1)
    yield case("wrong", [4] * 7, alike=10_000)
    yield case("no_drafts", [1] * 9)
    fewer = case("fewer_drafts", [4] * 3, alike=1)
    fewer.args[1][torch.tensor([0, 6], device=device)] = NO_DRAFT
    yield fewer
    yield case("many", [5] * 300, alike=2)
    yield case("one", [1])
    yield case("empty", [])


def _allocate(drawn: torch.Tensor, drafts: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
    return drawn.new_empty(row_start.shape[0] - 1)


@custom_op(cases=_cases, errors=ErrorModel(exact=True), allocate=_allocate, has_rows=False)
def verify_drafts(drawn: torch.Tensor, drafts: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
    """drawn int64 [R] -> how many tokens each of N requests gets, int64 [N]: its right drafts, and one token more.

    The i-th request has the rows from ``row_start[i]`` (int32 [N+1]) up to the next one's, at least one. ``drawn``
    holds the token that the model draws in each row, with the row's own position and the sampler's state behind the
    drafts before it; ``drafts`` int64 [R] the one proposed in its place, NO_DRAFT where there is none, as in a
    request's last row. Drafts are right up to the first that differs from what was drawn, and that draw is the token
    that follows.

    The rule is exact for every drafter and every setting of the sampler: each token is a draw from the model's own
    distribution, made by the random number of its position, just as without drafts. A draft x is right with probability
    p(x). For a drafter that proposes one certain token (q(x) = 1) that is min(1, p(x) / q(x)), the most that any exact
    rule reaches (Leviathan et al., arXiv:2211.17192). One that has a distribution q proposes its likeliest token, or
    draws by ``philox_uniform`` of the same seed and position as the model will.
    """
    rows = torch.arange(drawn.shape[0], device=drawn.device)
    request = torch.bucketize(rows, row_start[1:].long(), right=True)
    after = row_start[1:].long()  # behind a request's last row
    wrong = torch.where(drawn == drafts, drawn.shape[0], rows)
    first = after.scatter_reduce(0, request, wrong, "amin")
    return first - row_start[:-1].long() + 1
