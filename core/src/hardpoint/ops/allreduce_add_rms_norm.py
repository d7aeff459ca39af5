"""The sum over ranks, residual addition and norm in one: the site behind a layer that is divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import OpWorkload

if TYPE_CHECKING:
    from hardpoint.context import Context


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """The cases of ``add_rms_norm``, and more of the widths that kernels between devices are made for."""
    yield from add_rms_norm.cases(generator, dtype, device)
    draw = Draw(generator, dtype, device)
    for tokens, width in ((1, 4096), (4, 2048), (33, 1024), (130, 2560), (300, 1024)):
        inputs = (draw.normal(tokens, width), draw.normal(tokens, width), draw.normal(width))
        yield Case(f"{tokens}x{width}", inputs, {"eps": 1e-6})


@custom_op(
    cases=_cases,
    errors=ErrorModel(),  # at the row's magnitude: partial sums may cancel
    allocate=add_rms_norm.allocate,
    aliases=add_rms_norm.aliases,
    static=["eps"],
    sums="x",
)
def allreduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm`` of the sum over ranks of ``x`` [T, n]: every rank calls it with its own partial sum.

    residual [T, n] and weight [n] are the same on every rank. The results are too, to the bit, each [T, n]: the norm of
    ``sum of x + residual``, and that sum, rounded to x's dtype. ``x`` may be written to; nobody reads it afterwards.
    ``residual`` may be written to if the second output is it.
    """
    return add_rms_norm.reference(x, residual, weight, eps=eps)


def compose(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The group's ``all_reduce``, and then ``add_rms_norm`` as selected; parts of these names stand in for them."""
    all_reduce = parts.get("all_reduce") or ctx.parallel.tp.all_reduce
    add_then_norm = parts.get("add_rms_norm") or add_rms_norm.bind(ctx, scalars=add_rms_norm.told(workload))

    def allreduce_add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = add_then_norm(all_reduce(x), residual, weight, eps=eps)
        return normed, total

    return allreduce_add_rms_norm
