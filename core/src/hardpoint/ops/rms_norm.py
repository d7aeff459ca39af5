"""Root-mean-square norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.each_row import each_row
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.quantize_rows import ROUNDED, allocate_rounded, quantize_rows, rounded_cases
from hardpoint_plugin_api import OpWorkload, QuantSpec

if TYPE_CHECKING:
    from hardpoint.context import Context


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, x: torch.Tensor, eps: float = 1e-6) -> Case:
        return Case(name, (x, draw.normal(x.shape[-1])), {"eps": eps})

    yield case("random", draw.normal(7, 64))
    yield case("odd", draw.normal(5, 129), eps=1e-5)
    yield case("long", draw.normal(3, 8192))
    yield case("one", draw.normal(1, 1))
    yield case("heads", draw.normal(4, 6, 128))
    yield case("strided", draw.strided(6, 64))
    yield case("empty", draw.normal(0, 64))
    yield case("small", draw.normal(5, 256, scale=1e-3), eps=1e-5)  # here eps outweighs the mean square
    yield case("large", draw.normal(5, 256, scale=1e4))  # here squares overflow half precision
    yield case("zeros", torch.zeros(2, 64, dtype=dtype, device=device))
    peaked = draw.normal(4, 512)
    peaked[:, 17] = 3000.0  # what "massive activations" (arXiv:2402.17762) look like
    yield case("peaked", peaked)
    yield case("non_finite", draw.with_non_finite(3, 64))
    for width in COMMON_WIDTHS:
        yield case(f"width_{width}", draw.normal(2, width))


def _allocate(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@custom_op(cases=_cases, errors=ErrorModel(scale="element"), allocate=_allocate, static=["eps"], fusible=True)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x [..., n], weight [n] -> [..., n] in x's dtype: ``x / sqrt(mean(x^2) + eps) * weight``.

    Zhang & Sennrich 2019, arXiv:1910.07467. Squares are accumulated in float32 or wider; as in Llama, the normed
    values are rounded to x's dtype before the weight is applied.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)


def row_by_row(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """The reference on each row of x [T, ..., n] alone (one row, where x is [n]); see each_row."""
    rows = each_row(x if x.ndim > 1 else x[None])
    return torch.cat([rms_norm.reference(row, weight, eps=eps) for (row,) in rows]).view(x.shape)


def _allocate_quantized(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_rounded(x, x.shape[1], spec)


@custom_op(
    cases=rounded_cases(_cases),
    errors=ROUNDED,
    allocate=_allocate_quantized,
    unrounded=rms_norm.reference,
    static=["eps"],
    fusible=True,
)
def rms_norm_quantized(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, n], weight [n] -> ``rms_norm`` in x's dtype, then ``quantize_rows``: elements [T, n] and scales."""
    return quantize_rows.reference(rms_norm.reference(x, weight, eps=eps), spec=spec)


def compose_quantized(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op out of its two parts as selected, or as given by name."""
    norm = parts.get("rms_norm") or rms_norm.bind(ctx, scalars=rms_norm.told(workload))
    quantize = parts.get("quantize_rows") or quantize_rows.bind(ctx, spec=workload.spec)

    def rms_norm_quantized(
        x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize(norm(x, weight, eps=eps), spec=spec)

    return rms_norm_quantized
