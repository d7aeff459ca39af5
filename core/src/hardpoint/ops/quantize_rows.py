"""Rounding of activations, and what the ops share that return their result rounded.

Such an op takes the keyword ``spec`` and returns, in place of its first result [T, K], that result's elements and
scales, see ``hardpoint_plugin_api.Quantized``. It is judged by the numbers that these stand for, and the truth is the
result before it was rounded: where a number lies half-way between two elements, either is as right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hardpoint import numerics
from hardpoint.dtypes import dtype_of
from hardpoint.ops.base import Case, CaseGenerator, custom_op
from hardpoint.ops.draw import COMMON_WIDTHS, Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import QuantSpec, Scale

ROUNDED = ErrorModel(multiple=1.25, floor_peak=1.0, floor_row=0.5, finest=2.0**-9)
"""Rounding to the nearest element is most of the reference's own error, and cutting off would be twice that; what is
left for the result itself is some two thousandths of the row's greatest magnitude."""

_ROWS = (Scale("float32", (1, -1)),)
_SPECS = (
    QuantSpec("int8", scales=_ROWS, static=False),
    QuantSpec("float8_e4m3fn", scales=_ROWS, static=False),
    QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 32)),), static=False),
)
_FOR_ALL_SPECS, _EXTREME = "random", ("small", "large")


def rounded_cases(cases: CaseGenerator) -> CaseGenerator:
    """The ``cases`` whose first input is a matrix, with ``spec``: all of them to int8, the usual to others too."""

    def generate(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
        for case in cases(generator, dtype, device):
            x, usual = case.args[0], case.name.endswith(_FOR_ALL_SPECS)
            if x.ndim != 2 or x.shape[1] == 1:
                continue  # of one element, rounding leaves nothing to compare with
            if dtype == torch.float16 and case.name.endswith(_EXTREME):
                continue  # what does not fit half precision is lost before there is anything to round
            for spec in _SPECS if usual else _SPECS[:1]:
                yield replace(
                    case,
                    name=f"{case.name}_{spec.element}_{spec.scales[0]}",
                    kwargs={**case.kwargs, "spec": spec},
                    workload={**case.workload, "spec": spec},
                )

    return generate


def allocate_rounded(x: torch.Tensor, columns: int, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty elements and scales of [T, ``columns``], for as many rows as ``x`` has."""
    scales = spec.scales[0].shape(x.shape[0], columns)
    return (
        x.new_empty(x.shape[0], columns, dtype=dtype_of(spec.storage)),
        x.new_empty(scales, dtype=torch.float32),
    )


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)
    yield Case("random", (draw.normal(7, 64),))
    yield Case("odd", (draw.normal(5, 129),))
    yield Case("long", (draw.normal(3, 8192),))
    yield Case("strided", (draw.strided(6, 64),))
    yield Case("empty", (draw.normal(0, 64),))
    yield Case("small", (draw.normal(5, 256, scale=1e-3),))
    yield Case("large", (draw.normal(5, 256, scale=1e4),))
    yield Case("zeros", (torch.zeros(2, 64, dtype=dtype, device=device),))
    peaked = draw.normal(4, 512)
    peaked[:, 17] = 300.0
    yield Case("peaked", (peaked,))
    yield Case("non_finite", (draw.with_non_finite(3, 64),))
    for width in COMMON_WIDTHS:
        yield Case(f"width_{width}", (draw.normal(2, width),))


def _allocate(x: torch.Tensor, *, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_rounded(x, x.shape[1], spec)


def _unrounded(x: torch.Tensor) -> torch.Tensor:
    return x


@custom_op(cases=rounded_cases(_cases), errors=ROUNDED, allocate=_allocate, unrounded=_unrounded)
def quantize_rows(x: torch.Tensor, *, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> its elements [T, K] and scales float32 [T, 1], or [T, K / k] (rounded up) for blocks of k columns.

    ``spec`` is one that may be a linear kernel's ``input_spec``. A block's scale maps its greatest magnitude to the
    greatest element, and is 1 for zeros; elements are the nearest, ties to even. A block with a number that is not
    finite stands for NaN.
    """
    rounded = numerics.quantize_rows(x, spec, {})
    return rounded.codes, rounded.scale.reshape(spec.scales[0].shape(*x.shape))
