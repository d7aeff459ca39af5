"""Parts that the routing ops share: scores, the choice of experts by them, and the weights of the chosen ones.

Axes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch

from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import ConfigError, UnknownNameError

Routed = tuple[torch.Tensor, torch.Tensor]
"""ids int32 [T, K] and weights [T, K], the likeliest expert first."""

ERRORS = ErrorModel(finest=2.0**-20)
"""Weights are float32, whatever the logits are, and hardware approximates exponentials: 2^-20 of a row is a unit."""

SCORINGS = ("softmax", "sigmoid")
_TINY = 1e-20
"""Keeps a row without any weight from being divided by zero, and changes no other."""


def scores_of(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Scores [..., E] of logits, in float32 or wider. Raises UnknownNameError."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    match scoring:
        case "softmax":
            return wide.softmax(-1)
        case "sigmoid":
            return wide.sigmoid()
    raise UnknownNameError("scoring", scoring, SCORINGS)


def check_bias(bias: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise ConfigError unless a correction bias is as wide as scores are, with one number for each expert.

    A kernel would read float32 whatever is there: a bias in bfloat16 routes tokens anywhere without any sign of it.
    """
    dtype, experts = torch.promote_types(logits.dtype, torch.float32), logits.shape[-1]
    if bias.dtype != dtype or bias.shape != (experts,):
        raise ConfigError(
            f"a router's correction bias must be {str(dtype).removeprefix('torch.')} of shape [{experts}], got "
            f"{str(bias.dtype).removeprefix('torch.')} of shape {list(bias.shape)}; convert it with bias.float()"
        )


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` highest of each row stand, int64, highest first; of equals the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def weigh(scores: torch.Tensor, ids: torch.Tensor, renormalize: bool, scaling: float) -> Routed:
    """The chosen experts [T, K] with their scores as weights, which add up to ``scaling`` where renormalised."""
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return ids.to(torch.int32), weights * scaling


def allocate_routed(logits: torch.Tensor, top_k: int) -> Routed:
    """Empty outputs for a routing op."""
    shape, wide = (logits.shape[0], top_k), torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=wide)


def random_logits(draw: Draw, tokens: int, experts: int, step: float = 0.125) -> torch.Tensor:
    """Logits [T, E]; a row's are different multiples of ``step``, and still differ once they are rounded."""
    if tokens == 0:
        return draw.normal(0, experts)
    rows = torch.stack([draw.distinct(-(experts // 2), experts - experts // 2, experts) for _ in range(tokens)])
    return (rows * step).to(draw.dtype)


def random_bias(draw: Draw, experts: int) -> torch.Tensor:
    """A correction bias that changes many choices: different multiples of 1/64, far apart beside a score's rounding."""
    return draw.distinct(-experts, experts, experts).float() / 64
