"""Root-mean-square norm of groups of channels, with a gate.

Axes: T tokens, G groups, n channels of a group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.activation import activation_function
from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel

Tensor = torch.Tensor


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str,
        x: Tensor,
        *,
        activation: str = "silu",
        gate_first: bool = False,
        own_weights: bool = False,
        eps: float = 1e-6,
    ) -> Case:
        tokens, groups, size = x.shape
        gate = draw.strided(tokens, groups * size).unflatten(1, (groups, size))
        weight = draw.normal(groups if own_weights else 1, size)
        scalars = {"eps": eps, "activation": activation, "gate_first": gate_first}
        return Case(name, (x, gate, weight), scalars, {"activation": activation})

    yield case("random", draw.normal(7, 4, 128))
    yield case("odd", draw.normal(5, 3, 17), eps=1e-5)
    yield case("sigmoid", draw.normal(4, 4, 64), activation="sigmoid")
    yield case("gate_first", draw.normal(6, 2, 96), gate_first=True, own_weights=True)
    yield case("one_group", draw.normal(3, 1, 2048), gate_first=True, own_weights=True)
    yield case("own_weights", draw.normal(4, 3, 40), own_weights=True)
    yield case("small", draw.normal(5, 4, 64, scale=1e-3), eps=1e-5)
    yield case("zeros", torch.zeros(2, 2, 32, dtype=dtype, device=device))
    yield case("one", draw.normal(1, 1, 1))
    yield case("empty", draw.normal(0, 4, 64))
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", draw.normal(2, 1, width), own_weights=True)


def _allocate(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str, gate_first: bool) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(
    cases=_cases,
    errors=ErrorModel(scale="element", finest=2.0**-20),
    allocate=_allocate,
    static=["eps", "gate_first"],
    fusible=True,
)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str, gate_first: bool) -> Tensor:
    """x, gate [T, G, n], weight [G, n] or [1, n] -> [T, G, n] in x's dtype, each group of n normed by itself.

    ``rms_norm(x) * weight * activation(gate)``, or with ``gate_first`` ``rms_norm(x * activation(gate)) * weight``
    (Mamba-2, arXiv:2405.21060, section 7.3). Computed in float32 or wider, and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y, factor = x.to(wide), activation_function(activation)(gate.to(wide))
    if gate_first:
        y = y * factor
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    return (y if gate_first else y * factor).to(x.dtype)
