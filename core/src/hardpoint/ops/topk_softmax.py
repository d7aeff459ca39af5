"""The router of Mixtral and Qwen: the likeliest experts of a softmax over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.each_row import each_row
from hardpoint.ops.routing import (
    ERRORS,
    Routed,
    allocate_routed,
    best,
    check_bias,
    random_bias,
    random_logits,
    scores_of,
    weigh,
)


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, logits: torch.Tensor, top_k: int, *bias: torch.Tensor, **changes: Any) -> Case:
        settings = {"top_k": top_k, "renormalize": False, "scaling": 1.0} | changes
        return Case(name, (logits, *bias), settings)

    yield case("random", random_logits(draw, 9, 8), 2)
    yield case("renormalized", random_logits(draw, 9, 128), 8, renormalize=True)
    yield case("scaled", random_logits(draw, 5, 64), 6, renormalize=True, scaling=2.5)
    yield case("scaled_alone", random_logits(draw, 5, 60), 4, scaling=0.5)
    yield case("bias", random_logits(draw, 7, 64), 4, random_bias(draw, 64), renormalize=True)
    yield case("many", random_logits(draw, 700, 16), 2)
    yield case("odd", random_logits(draw, 5, 37), 3)
    yield case("all", random_logits(draw, 4, 5), 5, renormalize=True)
    yield case("one_of_one", random_logits(draw, 1, 1), 1)
    yield case("flat", random_logits(draw, 4, 64, step=2.0**-10), 4, renormalize=True)
    yield case("peaked", random_logits(draw, 4, 16, step=4.0), 3, renormalize=True)
    yield case("equal", torch.zeros(3, 40, dtype=dtype, device=device), 4, renormalize=True)
    yield case("strided", random_logits(draw, 6, 2 * 32)[:, 5:37], 4)
    yield case("empty", random_logits(draw, 0, 8), 2)


def _allocate(
    logits: torch.Tensor, bias: torch.Tensor | None = None, *, top_k: int, renormalize: bool, scaling: float
) -> Routed:
    return allocate_routed(logits, top_k)


@custom_op(cases=_cases, errors=ERRORS, allocate=_allocate)
def topk_softmax(
    logits: torch.Tensor, bias: torch.Tensor | None = None, *, top_k: int, renormalize: bool, scaling: float
) -> Routed:
    """logits [T, E] -> (ids int32 [T, K], weights float32 or wider [T, K]): the ``top_k`` likeliest experts of a row.

    Weights are the softmax over all E (Fedus et al. 2021, arXiv:2101.03961), divided by their sum where
    ``renormalize``, then times ``scaling``. The likeliest comes first, of equals the one with the lower number.
    ``bias``, float32 [E], is added to the softmax for the choice and the order alone. Raises ConfigError for a bias of
    another dtype or shape.
    """
    scores = scores_of(logits, "softmax")
    if bias is None:
        return weigh(scores, best(logits, top_k), renormalize, scaling)
    check_bias(bias, logits)
    return weigh(scores, best(scores + bias, top_k), renormalize, scaling)


def row_by_row(logits: torch.Tensor, bias: torch.Tensor | None = None, **settings: Any) -> Routed:
    """The reference on each row of logits [T, E] alone; see each_row."""
    ids, weights = zip(*(topk_softmax.reference(row, bias, **settings) for (row,) in each_row(logits)), strict=True)
    return torch.cat(ids), torch.cat(weights)
