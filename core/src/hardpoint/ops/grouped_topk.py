"""DeepSeek's router: the best groups of experts first, then the best experts of those groups.

Axes: T tokens, E experts, K experts per token, G groups.
"""

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
from hardpoint_plugin_api import ConfigError


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str, tokens: int, experts: int, top_k: int, groups: int, top_groups: int, *bias: torch.Tensor, **more: Any
    ) -> Case:
        settings = {"top_k": top_k, "num_groups": groups, "top_groups": top_groups, "scaling": 1.0} | more
        settings = {"scoring": "sigmoid", "renormalize": False} | settings
        return Case(name, (random_logits(draw, tokens, experts), *bias), settings)

    yield case("random", 9, 64, 6, 8, 3)
    yield case("softmax", 9, 160, 6, 8, 3, scoring="softmax", scaling=16.0)
    yield case("bias", 9, 64, 6, 8, 4, random_bias(draw, 64))
    yield case("bias_scaled", 9, 256, 8, 8, 4, random_bias(draw, 256), renormalize=True, scaling=2.5)
    yield case("softmax_bias", 5, 64, 4, 4, 2, random_bias(draw, 64), scoring="softmax", renormalize=True)
    yield case("negative_bias", 5, 32, 4, 4, 2, -2 - random_bias(draw, 32).abs(), renormalize=True)
    yield case("one_group", 5, 32, 4, 1, 1, random_bias(draw, 32))
    yield case("every_group", 5, 32, 4, 4, 4, random_bias(draw, 32))
    yield case("all_of_a_group", 5, 12, 3, 4, 1)
    yield case("groups_of_one", 5, 6, 2, 6, 2, random_bias(draw, 6))
    yield case("many", 700, 16, 2, 4, 2, random_bias(draw, 16))
    strided = case("strided", 6, 64, 4, 4, 2)
    yield Case("strided", (strided.args[0][:, 5:37],), strided.kwargs)
    yield case("empty", 0, 8, 2, 2, 1)


def _allocate(logits: torch.Tensor, bias: torch.Tensor | None = None, *, top_k: int, **settings: Any) -> Routed:
    return allocate_routed(logits, top_k)


@custom_op(cases=_cases, errors=ERRORS, allocate=_allocate)
def grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    scoring: str,
    renormalize: bool,
    scaling: float,
) -> Routed:
    """logits [T, E] -> (ids int32 [T, K], weights float32 or wider [T, K]): the ``top_k`` best of the best groups.

    A group is E / ``num_groups`` neighbours. With a ``bias``, float32 [E], its score is the sum of its two highest
    scores with the bias added (DeepSeek-V3, arXiv:2412.19437), and otherwise its highest score (DeepSeek-V2,
    arXiv:2405.04434); only experts of the ``top_groups`` best are chosen from. The bias, the weights, their order and
    equals are as in topk_sigmoid, with ``scoring`` (softmax or sigmoid) in place of the sigmoid.
    Raises ConfigError for groups that do not divide E or hold fewer than ``top_k`` experts, and for a bias of another
    dtype or shape.
    """
    experts = logits.shape[-1]
    if experts % num_groups or not 1 <= top_groups <= num_groups or top_k > top_groups * (experts // num_groups):
        raise ConfigError(
            f"grouped_topk: {top_k} experts of the best {top_groups} of {num_groups} groups of {experts} experts "
            "cannot be chosen; groups must divide the experts, and hold enough of them"
        )
    scores = scores_of(logits, scoring)
    if bias is not None:
        check_bias(bias, logits)
    choice = scores if bias is None else scores + bias
    groups = choice.unflatten(-1, (num_groups, -1))
    if bias is None:
        group_scores = groups.amax(-1)
    else:
        group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best(group_scores, top_groups), True)
    allowed = groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(-2)
    return weigh(scores, best(allowed, top_k), renormalize, scaling)


def row_by_row(logits: torch.Tensor, bias: torch.Tensor | None = None, **settings: Any) -> Routed:
    """The reference on each row of logits [T, E] alone; see each_row."""
    ids, weights = zip(*(grouped_topk.reference(row, bias, **settings) for (row,) in each_row(logits)), strict=True)
    return torch.cat(ids), torch.cat(weights)
