"""Routers of mixtures: which of ours a module of Transformers' is, and the layer that takes its place.

Axes: T tokens, H hidden, E experts, K experts of a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hardpoint.context import Context
from hardpoint.layers import Linear
from hardpoint.layers.base import PluggableLayer
from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.matching import with_parameters
from hardpoint.ops.route_topk import route_topk, settings
from hardpoint_plugin_api import ForwardStep, LinearArgs, RouterArgs, WeightSlot

BIAS = "e_score_correction_bias"
_TOKENS = 5


@dataclass(frozen=True)
class RouterMatch:
    """``returned`` names the parts of the tuple that the module returns: "logits", "weights" and "ids"."""

    args: RouterArgs
    hidden_size: int
    returned: tuple[str, ...]


class Router(PluggableLayer):
    """Slot: correction_bias float32 [E], where there is one."""

    def __init__(self, ctx: Context, args: RouterArgs, hidden_size: int) -> None:
        super().__init__(ctx)
        self.args = args
        matrix = LinearArgs(hidden_size, (("experts", args.num_experts),), args.linear_bias, kind="router")
        self.linear = Linear(ctx.child("linear"), matrix)
        self._route, self._settings = route_topk.bind(ctx, routing=args.routing), settings(args)

    def declare(self) -> dict[str, WeightSlot]:
        return {"correction_bias": WeightSlot((self.args.num_experts,), "float32")} if self.args.bias else {}

    def allocate(self, x: torch.Tensor, step: ForwardStep) -> dict[str, torch.Tensor]:
        weights = x.new_empty(x.shape[0], self.args.top_k, dtype=torch.float32)
        logits = x.new_empty(x.shape[0], self.args.num_experts)
        return {"logits": logits, "weights": weights, "ids": torch.empty_like(weights, dtype=torch.int32)}

    def forward(self, x: torch.Tensor, step: ForwardStep) -> dict[str, torch.Tensor]:
        """x [T, H] -> logits [T, E], weights float32 [T, K], ids int32 [T, K]."""
        logits = self.linear(x, step)
        ids, weights = self._route(logits, self.weights.get("correction_bias"), **self._settings)
        return {"logits": logits, "weights": weights, "ids": ids}


class RouterStandIn(nn.Module):
    """Returns the tuple that the router it replaces returns, for x [T, H] or [1, T, H]."""

    layer: Any

    def __init__(self, path: str, current: Current, match: RouterMatch) -> None:
        super().__init__()
        self.path, self.current, self.match = path, current, match
        self.layer = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        if self.current.probe is None:
            found: dict[str, torch.Tensor] = self.layer(rows, self.current.step)
        else:
            count, args = rows.shape[0], self.match.args
            weights = torch.empty(count, args.top_k, device=x.device)
            logits = x.new_empty(count, args.num_experts)
            found = {"logits": logits, "weights": weights, "ids": torch.empty_like(weights, dtype=torch.int32)}
        return tuple(found[name] for name in self.match.returned)


def match_router(module: nn.Module) -> RouterMatch | None:
    """The router that ``module`` is, tried with random weights; None for another module."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    weight, linear = parameters.pop("weight", None), parameters.pop("bias", None)
    biases = {**parameters, **buffers}
    top_k = getattr(module, "top_k", None)
    if weight is None or weight.ndim != 2 or set(biases) - {BIAS} or not isinstance(top_k, int):
        return None
    experts, hidden = weight.shape
    x, tried = torch.randn(_TOKENS, hidden), torch.randn(experts, hidden) * hidden**-0.5
    bias = torch.rand(experts) * 0.2 if biases else None
    offset = torch.zeros(experts) if linear is None else torch.randn(experts)
    copied = with_parameters(module, weight=tried, **({} if linear is None else {"bias": offset}))
    if bias is not None:
        copied._parameters.pop(BIAS, None)
        copied._buffers[BIAS] = bias
    try:
        with torch.no_grad():
            output = copied(x)
    except Exception:  # it wants something else
        return None
    returned = _names(output, experts, top_k)
    if returned is None:
        return None
    found = dict(zip(returned, output, strict=True))
    for args in _candidates(module, experts, top_k, bias is not None, linear is not None):
        ids, weights = route_topk.reference(x @ tried.t() + offset, bias, **settings(args))
        if _same(found["ids"].long(), found["weights"].float(), ids.long(), weights.float(), experts):
            return RouterMatch(args, hidden, returned)
    return None


def _names(output: object, experts: int, top_k: int) -> tuple[str, ...] | None:
    """Which is which in the returned tuple, by shapes; None where that does not tell."""
    shapes = {(_TOKENS, experts): "logits", (_TOKENS, top_k): "weights"}
    if not isinstance(output, tuple) or experts == top_k or not all(isinstance(x, torch.Tensor) for x in output):
        return None
    names = tuple("ids" if not x.is_floating_point() else shapes.get(tuple(x.shape), "") for x in output)
    return names if sorted(names) in (["ids", "logits", "weights"], ["ids", "weights"]) else None


def _candidates(module: nn.Module, experts: int, top_k: int, bias: bool, linear_bias: bool) -> Iterator[RouterArgs]:
    """Routers that the attributes of ``module`` allow."""
    factor = getattr(module, "routed_scaling_factor", None)
    groups = next((getattr(module, name) for name in ("num_group", "n_group") if hasattr(module, name)), None)
    tops = getattr(module, "topk_group", None)
    grouped = [(1, 1), *([(groups, tops)] if isinstance(groups, int) and isinstance(tops, int) else [])]
    scalings = [1.0, *([float(factor)] if isinstance(factor, int | float) else [])]
    for scoring, renormalize, scaling, (number, top) in itertools.product(
        ("softmax", "sigmoid"), (False, True), scalings, grouped
    ):
        yield RouterArgs(
            experts,
            top_k,
            scoring=scoring,  # type: ignore[arg-type]  # one of the two literals
            bias=bias,
            renormalize=renormalize,
            scaling=scaling,
            num_groups=number,
            top_groups=top,
            linear_bias=linear_bias,
        )


def _same(ids: torch.Tensor, weights: torch.Tensor, other_ids: torch.Tensor, other: torch.Tensor, experts: int) -> bool:
    """Whether both choose the same experts for each token, with the same weights, in whatever order."""
    dense = torch.zeros(ids.shape[0], experts)
    return torch.allclose(dense.scatter(1, ids, weights), dense.scatter(1, other_ids, other), 1e-4, 1e-5)
