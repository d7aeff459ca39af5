"""The middle of a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.activation import ACTIVATIONS, activation_function, activation_inputs
from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)
    for name in ACTIVATIONS:
        for kind, x in activation_inputs(draw, 192):
            yield Case(f"{name}_{kind}", (x,), {"activation": name})
        yield Case(f"{name}_odd", (draw.normal(5, 2 * 37),), {"activation": name})


def _allocate(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@custom_op(cases=_cases, errors=ErrorModel(scale="row"), allocate=_allocate)
def act_and_mul(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """x [T, 2I], gate first -> ``activation(gate) * up`` [T, I] (Shazeer 2020, arXiv:2002.05202).

    Raises UnknownNameError for a name that is not in ACTIVATIONS.
    """
    gate, up = x.chunk(2, dim=-1)
    return activation_function(activation)(gate) * up
