"""The middle of a gated feed-forward layer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.ops.activation import ACTIVATIONS, activation_inputs
from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.each_row import each_row
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.quantize_rows import ROUNDED, allocate_rounded, quantize_rows, rounded_cases
from hardpoint_plugin_api import MoEArgs, OpWorkload, QuantSpec, UnknownNameError

if TYPE_CHECKING:
    from hardpoint.context import Context


def _gated_by(activation: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return activation(gate) * up


SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT = MoEArgs.swiglu_alpha, MoEArgs.swiglu_limit
_SWIGLU_OAI_WITH = re.compile(r"swiglu_oai\((?P<alpha>[\d.e+-]+),(?P<limit>[\d.e+-]+)\)")
"""With parameters of its own: see MoEArgs.experts_activation."""


def _swiglu_oai(
    gate: torch.Tensor, up: torch.Tensor, alpha: float = SWIGLU_OAI_ALPHA, limit: float = SWIGLU_OAI_LIMIT
) -> torch.Tensor:
    """gpt-oss's (OpenAI 2025, arXiv:2508.10925): clamped, ``up`` shifted by one, a sigmoid steeper than SiLU's.

    The defaults are those of its reference implementation, ``gpt_oss/torch/model.py``.
    """
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * alpha) * (up.clamp(-limit, limit) + 1)


GATED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{name: functools.partial(_gated_by, function) for name, function in ACTIVATIONS.items()},
    "swiglu_oai": _swiglu_oai,
}
"""By name, what becomes of a gate and of what it gates. The functions of ACTIVATIONS become ``activation(gate) *
x``."""


def gating(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function called ``name``, of GATED or ``swiglu_oai(ALPHA,LIMIT)``; raises UnknownNameError for another."""
    if name in GATED:
        return GATED[name]
    if found := _SWIGLU_OAI_WITH.fullmatch(name):
        return functools.partial(_swiglu_oai, alpha=float(found["alpha"]), limit=float(found["limit"]))
    raise UnknownNameError("activation", name, GATED)


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)
    for name in GATED:
        for kind, x in activation_inputs(draw, 192):
            yield Case(f"{name}_{kind}", (x,), {"activation": name}, {"activation": name})
        scalars = {"activation": name}
        yield Case(f"{name}_odd", (draw.normal(5, 2 * 37),), scalars, scalars)
        gate, up = draw.with_nan(3, 96), draw.normal(3, 96)
        yield Case(f"{name}_gate_nan", (torch.cat((gate, up), dim=1),), scalars, scalars)
        for width in COMMON_WIDTHS:
            yield Case(f"{name}_width_{width}", (draw.normal(2, 2 * width),), scalars, scalars)


def _allocate(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@custom_op(cases=_cases, errors=ErrorModel(scale="row"), allocate=_allocate, fusible=True)
def act_and_mul(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """x [T, 2I], gate first -> ``activation(gate) * up`` [T, I] (Shazeer 2020, arXiv:2002.05202).

    ``activation`` is a name as in ``gating``. Raises UnknownNameError for another.
    """
    return gating(activation)(*x.chunk(2, dim=-1))


def row_by_row(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """The reference on each row of x [T, 2I] alone; see each_row."""
    return torch.cat([act_and_mul.reference(row, activation=activation) for (row,) in each_row(x)])


def _allocate_quantized(x: torch.Tensor, *, activation: str, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_rounded(x, x.shape[1] // 2, spec)


@custom_op(
    cases=rounded_cases(_cases),
    errors=ROUNDED,
    allocate=_allocate_quantized,
    unrounded=act_and_mul.reference,
    fusible=True,
)
def act_and_mul_quantized(x: torch.Tensor, *, activation: str, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, 2I] -> ``act_and_mul`` in x's dtype, then ``quantize_rows``: elements [T, I] and scales."""
    return quantize_rows.reference(act_and_mul.reference(x, activation=activation), spec=spec)


def compose_quantized(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op out of its two parts as selected, or as given by name."""
    gate = parts.get("act_and_mul") or act_and_mul.bind(ctx, activation=workload.activation)
    quantize = parts.get("quantize_rows") or quantize_rows.bind(ctx, spec=workload.spec)

    def act_and_mul_quantized(
        x: torch.Tensor, *, activation: str, spec: QuantSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize(gate(x, activation=activation), spec=spec)

    return act_and_mul_quantized
