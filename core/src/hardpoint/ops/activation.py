"""Activation functions of feed-forward layers: the one table of them, and the op for ungated layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.each_row import each_row
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import UnknownNameError


def _relu2(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU (So et al. 2021, arXiv:2109.08668)."""
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,  # x sigmoid(x): Elfwing et al. 2017, arXiv:1702.03118
    "gelu": functional.gelu,  # x Phi(x), by the error function: Hendrycks & Gimpel 2016, arXiv:1606.08415
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),  # the same paper's approximation
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,  # as a gate: Dauphin et al. 2016, arXiv:1612.08083
}

_HUGGING_FACE = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
}


def activation_of_hf(hidden_act: str, where: str = "") -> str:
    """Our name for a Hugging Face config's ``hidden_act``: many of those are one function written differently.

    Raises UnknownNameError, which ends with ``where``, for one that we do not have.
    """
    if hidden_act not in _HUGGING_FACE:
        raise UnknownNameError("hidden_act", hidden_act, _HUGGING_FACE, where)
    return _HUGGING_FACE[hidden_act]


def activation_function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The elementwise function called ``name``; raises UnknownNameError."""
    if name not in ACTIVATIONS:
        raise UnknownNameError("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)
    for name in ACTIVATIONS:
        for kind, x in activation_inputs(draw, 96):
            yield Case(f"{name}_{kind}", (x,), {"activation": name}, {"activation": name})
        for width in COMMON_WIDTHS:
            yield Case(f"{name}_width_{width}", (draw.normal(2, width),), {"activation": name}, {"activation": name})


def activation_inputs(draw: Draw, width: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Named inputs [T, width] on which activation functions are told from one another."""
    yield "random", draw.normal(7, width, scale=2.0)
    yield "tail", draw.between(-4.0, -2.0, 5, width)  # where the two forms of gelu differ most, relatively
    yield "large", draw.normal(3, width, scale=300.0)
    yield "small", draw.normal(3, width, scale=1e-3)
    yield "wide", draw.between(-20.0, 20.0, 5, width)  # where a function nears its limits, and is not yet there
    most = 6e4 if draw.dtype == torch.float16 else 2e5
    yield "huge", draw.between(-most, most, 2, width)
    yield "strided", draw.strided(4, width)
    yield "empty", draw.normal(0, width)
    yield "one", draw.normal(1, width)
    yield "nan", draw.with_nan(3, width)  # not infinity: torch itself takes it to different values per dtype


def _allocate(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@custom_op(cases=_cases, errors=ErrorModel(scale="row"), allocate=_allocate, fusible=True)
def activation(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """x [T, n] -> ``activation(x)`` [T, n]; raises UnknownNameError for a name that is not in ACTIVATIONS."""
    return activation_function(activation)(x)


def row_by_row(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """The reference on each row of x [T, n] alone; see each_row."""
    return torch.cat([activation_function(activation)(row) for (row,) in each_row(x)])
