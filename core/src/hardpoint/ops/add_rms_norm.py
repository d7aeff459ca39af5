"""Residual addition and norm in one: the site between two sub-layers of a pre-norm decoder block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.quantize_rows import ROUNDED, allocate_rounded, quantize_rows, rounded_cases
from hardpoint.ops.rms_norm import rms_norm
from hardpoint_plugin_api import OpWorkload, QuantSpec

if TYPE_CHECKING:
    from hardpoint.context import Context


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, x: torch.Tensor, residual: torch.Tensor, eps: float = 1e-6) -> Case:
        return Case(name, (x, residual, draw.normal(x.shape[-1])), {"eps": eps})

    yield case("random", draw.normal(7, 64), draw.normal(7, 64))
    yield case("odd", draw.normal(5, 129), draw.normal(5, 129), eps=1e-5)
    yield case("long", draw.normal(3, 8192), draw.normal(3, 8192))
    yield case("one", draw.normal(1, 1), draw.normal(1, 1))
    yield case("strided", draw.strided(6, 64), draw.strided(6, 64))
    yield case("empty", draw.normal(0, 64), draw.normal(0, 64))
    yield case("small", draw.normal(5, 256, scale=1e-3), draw.normal(5, 256, scale=1e-3), eps=1e-5)
    yield case("large_residual", draw.normal(5, 256), draw.normal(5, 256, scale=1e4))
    x = draw.normal(3, 64)
    yield case("cancelling", x, -x)
    yield case("non_finite", draw.normal(3, 64), draw.with_non_finite(3, 64))
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", draw.normal(2, width), draw.normal(2, width))


def _allocate(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@custom_op(
    cases=_cases,
    errors=ErrorModel(scale="element"),
    allocate=_allocate,
    aliases=[(1, "residual")],
    static=["eps"],
    fusible=True,
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, n], weight [n] -> (``rms_norm(x + residual)``, ``x + residual``), each [T, n].

    The sum is rounded to x's dtype before it is normed. ``residual`` may be written to if the second output is it.
    """
    return _add_then(rms_norm.reference)(x, residual, weight, eps=eps)


def compose(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op out of the norm as selected; part ``rms_norm`` stands in for it where given."""
    return _add_then(parts.get("rms_norm") or rms_norm.bind(ctx, scalars=rms_norm.told(workload)))


def _add_then(norm: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return norm(total, weight, eps=eps), total

    return add_rms_norm


def _allocate_quantized(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *allocate_rounded(x, x.shape[1], spec), x.new_empty(x.shape)


@custom_op(
    cases=rounded_cases(_cases),
    errors=ROUNDED,
    allocate=_allocate_quantized,
    aliases=[(2, "residual")],
    unrounded=add_rms_norm.reference,
    static=["eps"],
    fusible=True,
)
def add_rms_norm_quantized(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``add_rms_norm``, its first result in x's dtype and then by ``quantize_rows``.

    x, residual [T, n], weight [n] -> elements [T, n], scales, ``x + residual`` [T, n]. ``residual`` may be written to
    if the third output is it.
    """
    out, total = add_rms_norm.reference(x, residual, weight, eps=eps)
    return *quantize_rows.reference(out, spec=spec), total


def compose_quantized(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The op out of its two parts as selected, or as given by name."""
    norm = parts.get("add_rms_norm") or add_rms_norm.bind(ctx, scalars=add_rms_norm.told(workload))
    quantize = parts.get("quantize_rows") or quantize_rows.bind(ctx, spec=workload.spec)

    def add_rms_norm_quantized(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, total = norm(x, residual, weight, eps=eps)
        return *quantize(out, spec=spec), total

    return add_rms_norm_quantized
