"""How far a weight that was quantized while loading may be off: what rounding by its spec can cost, and no more.

The bound holds for any method that rounds to the nearest element, with scales that just fit: they map the largest
magnitude of a block to the largest element, or with zero points the block's range, with zero in it, to that of the
elements. It is the sum of

* half the gap between the two elements on either side of the number, times the scale. The scale is known up to the
  rounding of its own format, so the widest gap counts that the number may fall into;
* what the rounding of the scale to its format shifts the largest element by;
* what lies outside the range of the elements: negative numbers of elements without a sign;
* half a step more where there is a zero point, which is rounded, too.

Signed integers have one value more below zero than above (-8 to 7). A scale may map the number of the largest magnitude
to that value, as ggml's Q4_0 does, and is negative where that number is positive. Numbers of the other sign are then
clipped by up to a step.
Scales of the format e8m0 are powers of two. OCP's rule (Microscaling Formats 1.0, section 6.3) takes one at which the
largest numbers are clipped; the next larger one is as good an answer. Axes: N rows (out), K columns (in).
"""

from __future__ import annotations

import math

import torch

from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import Element, QuantSpec, Scale

_E8M0 = "float8_e8m0fnu"
_LEAST = 1e-12
"""Numbers are computed in float64 of what is read; this and a share of 2^-10 cover that."""


def rounding_bound(weight: torch.Tensor, spec: QuantSpec, groups: torch.Tensor | None = None) -> torch.Tensor | None:
    """How far [N, K] each number of ``weight`` [N, K], float64, may be off; ``groups`` [K] where ``spec`` is permuted.

    None where ``spec`` names an element that it does not define.
    """
    element = spec.definition
    if element is None:
        return None
    blocks = _blocks(spec.scales[0], weight, groups)
    extent, span = _extent(weight, blocks, spec), _span(spec)
    limit = torch.zeros_like(weight)
    bottom, top = (-span, span) if spec.zero_point else (element.values[0], element.values[-1])
    for scale, away in _scales(weight, spec, extent / span, extent, groups):
        high, low = scale + away, (scale - away).clamp(min=_LEAST)
        rounding = high * _half_gap(weight / high.clamp(min=_LEAST), weight / low, element)
        clipped = torch.maximum(weight - scale * top, scale * bottom - weight).clamp(min=0)
        limit = torch.maximum(limit, rounding * (2 if spec.zero_point else 1) + away * span + clipped)
    if element.takes_zero_point and not spec.zero_point and -bottom > top > 0:
        above, below = _most(weight, blocks), _most(-weight, blocks)
        other = torch.where(weight > 0, below >= above, above >= below)
        for scale, away in _scales(weight, spec, extent / -bottom, extent, groups):
            clipped = torch.where(other, weight.abs() - scale * top, 0.0).clamp(min=0)
            limit = torch.maximum(limit, torch.maximum(scale / 2, clipped) + away * -bottom)
    return limit * (1 + 2**-10) + _LEAST


def _span(spec: QuantSpec) -> float:
    """The range of elements that the extent of a block is mapped to."""
    element = spec.number_format
    return element.values[-1] - element.values[0] if spec.zero_point else element.largest


def _blocks(scale: Scale, weight: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
    """The number [N, K] of the block that each element is in."""
    (n, k), (rows, columns) = scale.block, weight.shape
    down = torch.zeros(rows, dtype=torch.int64) if n == -1 else torch.arange(rows) // n
    across = torch.zeros(columns, dtype=torch.int64) if k == -1 else torch.arange(columns) // k
    if groups is not None and k != -1:
        across = groups.long()
    return down[:, None] * (int(across.max()) + 1) + across


def _most(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The largest [N, K] of each element's block, or zero where that is less."""
    return x.new_zeros(int(blocks.max()) + 1).scatter_reduce(0, blocks.flatten(), x.flatten(), "amax")[blocks]


def _extent(weight: torch.Tensor, blocks: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The largest magnitude [N, K] of each element's block; with a zero point, its range with zero in it."""
    above, below = _most(weight, blocks), _most(-weight, blocks)
    return above + below if spec.zero_point else torch.maximum(above, below)


def _scales(
    weight: torch.Tensor, spec: QuantSpec, scale: torch.Tensor, extent: torch.Tensor, groups: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The honest answers: the scale of each element [N, K], and how far its format may take it from there."""
    lost, least = 0.0, torch.zeros_like(scale)
    for level, one in enumerate(spec.scales):
        facts = torch.finfo(dtype_of(one.format))
        if one.format == _E8M0:
            power = torch.floor(torch.log2(extent.clamp(min=_LEAST))) - math.floor(math.log2(_span(spec)))
            floor = torch.where(extent > 0, torch.exp2(power), 0.0)
            return [(floor, least), (2 * floor, least)]
        lost += facts.eps / 2
        if len(spec.scales) == 1:
            least = torch.full_like(scale, facts.smallest_normal * facts.eps / 2)  # half a step below normal numbers
        elif level + 1 < len(spec.scales) and facts.bits == 8:  # the next level leaves it few steps above zero
            outer = _extent(weight, _blocks(spec.scales[level + 1], weight, groups), spec)
            least = facts.smallest_normal * facts.eps / 2 * outer / (_span(spec) * facts.max)
    return [(scale, lost * scale + least)]


def _half_gap(near: torch.Tensor, far: torch.Tensor, element: Element) -> torch.Tensor:
    """Half the widest gap [N, K] between neighbouring values, among those from ``near`` to ``far``."""
    if element.takes_zero_point:
        return torch.full_like(near, 0.5)
    values = torch.tensor(element.values, dtype=torch.float64)
    gaps = values.diff()
    widest = gaps.expand(len(gaps), -1).triu().cummax(1).values
    first, last = (
        torch.searchsorted(values, x.contiguous(), right=True).sub(1).clamp(0, len(gaps) - 1)
        for x in (torch.minimum(near, far), torch.maximum(near, far))
    )
    return widest[first, last] / 2
