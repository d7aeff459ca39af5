"""From a router's logits to experts and weights, by whichever way of routing a model has: what the MoE layer calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.ops.base import Case, CustomOp, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.grouped_topk import grouped_topk
from hardpoint.ops.routing import ERRORS, SCORINGS, Routed, allocate_routed, random_bias, random_logits
from hardpoint.ops.topk_sigmoid import topk_sigmoid
from hardpoint.ops.topk_softmax import topk_softmax
from hardpoint_plugin_api import OpWorkload, RouterArgs, UnknownNameError

if TYPE_CHECKING:
    from hardpoint.context import Context

_PARTS: dict[str, CustomOp[..., Routed]] = {op.name: op for op in (topk_softmax, topk_sigmoid, grouped_topk)}


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, tokens: int, router: RouterArgs) -> Case:
        logits = random_logits(draw, tokens, router.num_experts)
        bias = (random_bias(draw, router.num_experts),) if router.bias else ()
        return Case(name, (logits, *bias), settings(router), {"routing": router.routing})

    yield case("softmax", 9, RouterArgs(8, 2))
    yield case("softmax_renormalized", 9, RouterArgs(128, 8, renormalize=True))
    yield case("softmax_bias", 5, RouterArgs(64, 4, bias=True, renormalize=True, scaling=1.5))
    yield case("sigmoid", 9, RouterArgs(16, 1, "sigmoid"))
    yield case("sigmoid_bias", 9, RouterArgs(64, 6, "sigmoid", bias=True, renormalize=True, scaling=2.5))
    yield case("groups", 9, RouterArgs(160, 6, num_groups=8, top_groups=3, scaling=16.0))
    yield case(
        "groups_bias",
        9,
        RouterArgs(256, 8, "sigmoid", bias=True, renormalize=True, scaling=2.5, num_groups=8, top_groups=4),
    )
    yield case("one", 1, RouterArgs(1, 1))
    yield case("empty", 0, RouterArgs(8, 2))


def settings(router: RouterArgs) -> dict[str, Any]:
    """The op's keywords for a router."""
    return {
        "top_k": router.top_k,
        "scoring": router.scoring,
        "renormalize": router.renormalize,
        "scaling": router.scaling,
        "num_groups": router.num_groups,
        "top_groups": router.top_groups,
    }


def _allocate(logits: torch.Tensor, bias: torch.Tensor | None = None, *, top_k: int, **settings: Any) -> Routed:
    return allocate_routed(logits, top_k)


@custom_op(cases=_cases, errors=ERRORS, allocate=_allocate)
def route_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling: float,
    num_groups: int,
    top_groups: int,
) -> Routed:
    """logits [T, E] -> (ids int32 [T, K], weights float32 or wider [T, K]), as a RouterArgs says.

    That is grouped_topk where ``num_groups`` is above 1, and otherwise topk_softmax or topk_sigmoid by ``scoring``.
    Raises UnknownNameError for another scoring, and what those raise.
    """
    whole = _dispatch({name: op.reference for name, op in _PARTS.items()})
    return whole(
        logits,
        bias,
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        scaling=scaling,
        num_groups=num_groups,
        top_groups=top_groups,
    )


def compose(ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Routed]:
    """The op out of the part that ``workload.routing`` names, as selected (all three where it names none)."""
    names = (workload.routing,) if workload.routing else tuple(_PARTS)
    return _dispatch({name: parts.get(name) or _PARTS[name].bind(ctx) for name in names})


def _dispatch(parts: Mapping[str, Callable[..., Routed]]) -> Callable[..., Routed]:
    def route_topk(
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        top_k: int,
        scoring: str,
        renormalize: bool,
        scaling: float,
        num_groups: int,
        top_groups: int,
    ) -> Routed:
        if num_groups > 1:
            return parts["grouped_topk"](
                logits,
                bias,
                top_k=top_k,
                num_groups=num_groups,
                top_groups=top_groups,
                scoring=scoring,
                renormalize=renormalize,
                scaling=scaling,
            )
        if scoring not in SCORINGS:
            raise UnknownNameError("scoring", scoring, SCORINGS)
        return parts[f"topk_{scoring}"](logits, bias, top_k=top_k, renormalize=renormalize, scaling=scaling)

    return route_topk
