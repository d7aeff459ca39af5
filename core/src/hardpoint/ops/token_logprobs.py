"""Log-probabilities of given tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.each_row import each_row
from hardpoint.ops.error_model import ErrorModel

Ranked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, n: int, v: int, top_n: int, scale: float = 0.125) -> Case:
        # Logits of a row are distinct multiples, also once rounded: ties may come in any order.
        steps = torch.stack([draw.distinct(-(v // 2), v - v // 2, v) for _ in range(n)]) if n else draw.normal(0, v)
        return Case(name, ((steps * scale).to(dtype), draw.integers(0, v, n)), {"top_n": top_n})

    yield case("random", 6, 200, 5)
    yield case("token_alone", 6, 200, 0)
    yield case("all", 3, 129, 129)
    yield case("flat", 4, 256, 20, scale=2.0**-10)
    yield case("peaked", 4, 256, 20, scale=8.0)
    masked = case("masked", 4, 200, 3)
    masked.args[0][:, ::2] = float("-inf")
    yield masked
    wide = torch.full((3, 32_000), -20.0, dtype=dtype, device=device)
    wide[:, 77:177] = torch.arange(100, device=device) * 0.125
    yield Case("wide", (wide, draw.integers(77, 177, 3)), {"top_n": 8})
    equal = torch.zeros(2, 50, dtype=dtype, device=device)
    yield Case("equal", (equal, draw.integers(0, 50, 2)), {"top_n": 0})
    yield case("one", 1, 1, 1)
    yield case("empty", 0, 100, 4)


def _allocate(logits: torch.Tensor, tokens: torch.Tensor, *, top_n: int) -> Ranked:
    shape, wide = (logits.shape[0], 1 + top_n), torch.promote_types(logits.dtype, torch.float32)
    ids, ranks = (logits.new_empty(shape, dtype=torch.int64) for _ in range(2))
    return ids, logits.new_empty(shape, dtype=wide), ranks


@custom_op(cases=_cases, errors=ErrorModel(), allocate=_allocate)
def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, *, top_n: int) -> Ranked:
    """logits [N, V], tokens int64 [N] -> (ids int64, logprobs float32 or wider, ranks int64), each [N, 1 + top_n].

    The first column is the row's token, the others are its ``top_n`` likeliest tokens, likeliest first, equally likely
    ones in any order. A logprob is the log-softmax over the whole vocabulary; a rank is 1 plus the number of likelier
    tokens, so that equally likely ones share theirs. ``top_n`` is at most V.
    """
    wide = _below_highest(logits)
    return _scores(wide, tokens, *wide.topk(top_n, dim=-1))


def row_by_row(logits: torch.Tensor, tokens: torch.Tensor, *, top_n: int) -> Ranked:
    """Each row of logits [N, V] alone (see each_row), equally likely tokens in the order of the vocabulary.

    So a row's likeliest tokens are the same however many of them another row asks for.
    """
    rows = []
    for logits_row, token in each_row(logits, tokens):
        wide = _below_highest(logits_row)
        top, top_ids = wide.sort(dim=-1, descending=True, stable=True) if top_n else wide.topk(0)
        rows.append(_scores(wide, token, top[:, :top_n], top_ids[:, :top_n]))
    ids, logprobs, ranks = (torch.cat(column) for column in zip(*rows, strict=True))
    return ids, logprobs, ranks


def _below_highest(logits: torch.Tensor) -> torch.Tensor:
    """How far each logit is from its row's highest: so that logprobs near zero are exact, and never above it."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide - wide.amax(-1, keepdim=True)


def _scores(wide: torch.Tensor, tokens: torch.Tensor, top: torch.Tensor, top_ids: torch.Tensor) -> Ranked:
    """``top`` and ``top_ids`` [N, top_n] are the highest of ``wide`` [N, V] and where they stand, highest first."""
    own = wide.gather(-1, tokens[:, None])
    own_rank = (wide > own).sum(-1, keepdim=True)
    top_ranks = torch.searchsorted(-top, -top)  # how many of a row that falls are above each
    ids, ranks = torch.cat([tokens[:, None], top_ids], -1), torch.cat([own_rank, top_ranks], -1) + 1
    return ids, torch.cat([own, top], -1) - wide.logsumexp(-1, keepdim=True), ranks
