"""Rounding to a spec's elements: activations while a step runs, weights while a checkpoint loads.

The way back is ``hardpoint_plugin_api.dequantize``. A tensor is viewed as blocks, each with a scale of its own:
scales have the shape of the view, with size 1 along what a block extends over, so that they broadcast. Axes: T
tokens, N rows, K columns, n x k a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import QuantSpec, Scale, decode_elements, minimum_slot, scale_slot
from hardpoint_plugin_api.elements import BUILT_IN

_E8M0 = "float8_e8m0fnu"
_ALL = Scale("float32", (-1, -1))
_REACH_BELOW = ("int4",)
"""Elements so few that the one more below zero counts: a block's number of the largest magnitude becomes the lowest
element, by a scale that is negative where the number is positive, as in ggml's Q4_0 (quantize_row_q4_0_ref)."""
_CHUNK = 1 << 19
"""Elements of a weight that are worked on at once: 2 MiB of float32 each, beside a matrix of any size. With fewer, the
calls cost more than the work: on two busy cores, 64 Ki took eight times as long for int8."""
_CHUNK_OF_ACCELERATOR = 1 << 24
"""The same where a call is a launch of some microseconds, which 64 MiB of float32 outweigh."""


def elements_at_once(device: torch.device) -> int:
    """How many elements of a weight on ``device`` are rounded at once; fewer cost as many calls."""
    return _CHUNK if device.type == "cpu" else _CHUNK_OF_ACCELERATOR


def largest(element: str) -> float:
    """The largest magnitude that a symmetric scale maps to, of one of core's own elements; see Element.largest."""
    return BUILT_IN[element].largest


def round_to(x: torch.Tensor, element: str) -> torch.Tensor:
    """Round float32 ``x`` to one of core's own elements, see Element.encode; codes in uint8 for four-bit floats."""
    return BUILT_IN[element].encode(x)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] of four bits each, in any integer dtype -> uint8 [..., K / 2], the low nibble first."""
    nibbles = codes.to(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(stored: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_nibbles``: uint8 [..., K / 2] -> uint8 [..., K] of 0 to 15."""
    return torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True)
class Rounded:
    """The result of ``quantize_rows``: elements one by one in the input's shape, and scales in that of its blocks.

    Blocks are [T, K], with scales [T, 1] or [1, 1]; or [T, K / k, k], with scales [T, K / k, 1].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None


def travels(spec: QuantSpec) -> bool:
    """Whether activations can be rounded to ``spec`` where they are made, with nothing but a row's own numbers."""
    return (
        len(spec.scales) == 1
        and spec.scales[0].block[0] == 1
        and spec.packing == "none"
        and not (spec.static or spec.zero_point)
    )


def quantize_rows(x: torch.Tensor, spec: QuantSpec, given: Mapping[str, torch.Tensor]) -> Rounded:
    """Quantize activations ``x`` [T, K] by the first level of a spec's scales.

    ``given`` holds ``input_scale`` and ``input_zero_point``, each [1], where the spec is static.
    """
    n, k = spec.scales[0].block
    blocks = _stretches(x.float(), k)
    if spec.static:
        scale = given["input_scale"].view(1, 1)
        zero_point = given["input_zero_point"].view(1, 1) if spec.zero_point else None
    else:
        scale, zero_point = _fit(blocks, spec, (0, 1) if n == -1 else (-1,))
    scaled = blocks / scale if zero_point is None else blocks / scale + zero_point
    return Rounded(_joined(spec.number_format.encode(scaled), x.shape), scale, zero_point)


def fake_quantize(x: torch.Tensor, spec: QuantSpec, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``x`` [T, K] quantized by ``spec`` and back, in its own dtype: what a quantized matmul takes its input to be.

    Where a spec has a second level of scales, that one is given (``input_scale_2``): the first applies to its quotient.
    """
    if spec.is_plain or not x.numel():
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    outer = given[scale_slot(1, "input")].to(wide) if len(spec.scales) == 2 else None
    rounded = quantize_rows(x if outer is None else x.to(wide) / outer, spec, given)
    codes = pack_nibbles(rounded.codes) if spec.packing == "nibbles" else rounded.codes
    blocks = _stretches(decode_elements(codes, spec, wide), spec.scales[0].block[1])
    if rounded.zero_point is not None:
        blocks = blocks - rounded.zero_point.to(wide)
    numbers = _joined(blocks * rounded.scale.to(wide), x.shape)
    return (numbers if outer is None else numbers * outer).to(x.dtype)


def _stretches(x: torch.Tensor, k: int) -> torch.Tensor:
    """[T, K] -> [T, K / k, k], the last stretch filled up with zeros, which are exact and change no scale."""
    return x if k == -1 else pad(x, (0, -x.shape[-1] % k)).unflatten(-1, (-1, k))


def _joined(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of ``_stretches``."""
    return blocks if blocks.shape == shape else blocks.flatten(-2)[..., : shape[-1]]


def quantize_weight(weight: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """Round a weight [N, K] to the nearest elements of any spec that is not plain; returns the spec's slots.

    ``weight_group_index`` is [K]: columns of alike magnitude share a group. Of several levels of scales the last is
    fitted first, and the others to what it leaves. A block at the edge may be smaller than the others. Of one level of
    scales, and of one number for all beside scales of rows, a few rows are worked on at a time, on the weight's device.
    Raises UnknownNameError for an element that the spec does not define, ValueError for zero points of elements that
    are no whole numbers, for an odd K of packed elements, and for column groups of unlike sizes.
    """
    spec.number_format  # noqa: B018  # raises what there is to say of the element
    if weight.shape[1] % spec.per_byte:
        raise ValueError(f"{spec}: two elements share a byte, so that K must be even, got {weight.shape[1]}")
    if spec.permuted:
        return _quantize_permuted(weight, spec)
    if spec.minimum:
        minima, offset = _minima(weight.float(), spec)
        return {**quantize_weight(weight.float() - offset, replace(spec, minimum=False)), **minima}
    if len(spec.scales) > 1:
        level, last = len(spec.scales) - 1, spec.scales[-1]
        scale = _outer_scale(weight, spec)
        rest = replace(spec, scales=spec.scales[:-1])
        if _has_one_number_outside(spec):
            return {**_quantize_rows_apart(weight, scale.float(), rest), scale_slot(level): scale}
        return {
            **quantize_weight(weight.float() / _spread(scale.float(), last, weight.shape), rest),
            scale_slot(level): scale,
        }
    return _quantize_level(weight, spec)


def quantize_stack(weights: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """``quantize_weight`` of each of ``weights`` [E, N, K], with any strides; slots with an axis of E in front.

    The same to the bit. Small matrices whose scales are of their own rows are rounded together. Raises what
    ``quantize_weight`` does.
    """
    count, rows, columns = weights.shape
    together = max(1, elements_at_once(weights.device) // (rows * columns)) if _by_rows(spec, rows) else 1
    slots: dict[str, torch.Tensor] = {}
    for start in range(0, count, together):
        part = weights[start : start + together]
        # A transposed matrix is turned at once, which torch does faster than some rows at a time.
        found = _quantize_flat(part, spec) if part.shape[0] > 1 else quantize_weight(part[0].contiguous(), spec)
        for name, value in found.items():
            apart = value.unflatten(0, (part.shape[0], -1))
            if name not in slots:
                slots[name] = value.new_empty(count, *apart.shape[1:])
            slots[name][start : start + together] = apart
    return slots


def _by_rows(spec: QuantSpec, rows: int) -> bool:
    """Whether matrices of ``rows`` can be rounded as one: no block reaches from one into the next, but for a number for
    all of a matrix beside scales of rows."""
    inner = spec.scales[:-1] if _has_one_number_outside(spec) else spec.scales
    return not spec.permuted and all(scale.block[0] > 0 and rows % scale.block[0] == 0 for scale in inner)


def _has_one_number_outside(spec: QuantSpec) -> bool:
    """Whether the last of several levels is one number, and the others have scales for a row each."""
    *inner, last = spec.scales
    return bool(inner) and last.block == (-1, -1) and not spec.minimum and all(one.block[0] == 1 for one in inner)


def _quantize_flat(weights: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """``quantize_weight`` of ``weights`` [E, N, K], see ``_by_rows``, as one matrix: slots [E * rows, ...]."""
    rows = weights.flatten(0, 1)
    if not _has_one_number_outside(spec):
        return quantize_weight(rows, spec)
    scale = _outer_scale(weights, spec).flatten(1)
    outer = scale.float().repeat_interleave(weights.shape[1], dim=0)
    rest = replace(spec, scales=spec.scales[:-1])
    return {**_quantize_rows_apart(rows, outer, rest), scale_slot(len(spec.scales) - 1): scale}


def _quantize_rows_apart(weight: torch.Tensor, outer: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """``quantize_weight`` of ``weight`` over ``outer`` [1, 1] or [N, 1], a few rows at a time: none shares a scale."""
    rows, columns = weight.shape
    height, slots = max(1, elements_at_once(weight.device) // columns), dict[str, torch.Tensor]()
    outer = outer.expand(rows, 1)
    for start in range(0, rows, height):
        part = slice(start, start + height)
        for name, value in quantize_weight(weight[part].float() / outer[part], spec).items():
            if name not in slots:
                slots[name] = value.new_empty(rows, value.shape[1])
            slots[name][start : start + value.shape[0]] = value
    return slots


def _quantize_permuted(weight: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """Columns in the order of their largest magnitude, cut into groups, and back in their own order."""
    columns = weight.shape[1]
    widths = {scale.block[1] for scale in spec.scales} - {-1}
    if len(widths) > 1:
        raise ValueError(f"{spec}: one group index cannot serve groups of {' and '.join(map(str, sorted(widths)))}")
    order = weight.abs().amax(0).argsort(descending=True)
    slots = quantize_weight(weight[:, order], replace(spec, permuted=False))
    place = order.argsort()
    codes = unpack_nibbles(slots["weight"]) if spec.packing == "nibbles" else slots["weight"]
    codes = codes.view(torch.uint8)[:, place]  # not every dtype can be indexed on every device
    slots["weight"] = pack_nibbles(codes) if spec.packing == "nibbles" else codes.view(slots["weight"].dtype)
    slots["weight_group_index"] = (place // next(iter(widths), columns)).int()
    return slots


def _minima(weight: torch.Tensor, spec: QuantSpec) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The slots with minima of ``weight`` [N, K], and the number for each element that they make, [N, K] float32.

    A block's least number, where it is negative, becomes the least element. One level holds it as it is; of several the
    last holds the least of its blocks over the largest number of the levels before it.
    """
    inner = spec.scales[0]
    blocks = _blocks(weight, *_whole(inner.block, weight.shape))
    least, slots = blocks.amin((1, 3)).clamp(max=0.0), {}
    offset = _spread(least, inner, weight.shape)
    outer = torch.ones_like(weight)
    for level in range(len(spec.scales) - 1, 0, -1):
        scale = spec.scales[level]
        most = _blocks((offset / outer).abs(), *_whole(scale.block, weight.shape)).amax((1, 3))
        tops = math.prod(_top(one.format) for one in spec.scales[:level])
        slots[minimum_slot(level)] = -_or_one(_rounded(divided(most, tops), scale.format))
        outer *= _spread(slots[minimum_slot(level)].float(), scale, weight.shape)
    of_block = _blocks(offset / outer, *_whole(inner.block, weight.shape)).amax((1, 3))
    if len(spec.scales) == 1:
        of_block = least
    slots[minimum_slot(0)] = _rounded(of_block, inner.format)
    outer *= _spread(slots[minimum_slot(0)].float(), inner, weight.shape)
    return slots, outer


def _outer_scale(weight: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The last level's scales, with which the levels before it reach as far as their formats do."""
    last, element = spec.scales[-1], spec.number_format
    if last.block == (-1, -1):  # no copy of the weight
        top, bottom = (extreme((-2, -1), keepdim=True).float() for extreme in (weight.amax, weight.amin))
    else:
        blocks = _blocks(weight, *_whole(last.block, weight.shape))
        top, bottom = blocks.amax((1, 3)), blocks.amin((1, 3))
    if spec.zero_point:
        extent, span = top.clamp(min=0.0) - bottom.clamp(max=0.0), element.values[-1] - element.values[0]
    else:
        extent, span = torch.maximum(top, -bottom), element.largest
    scale = divided(extent, span * math.prod(_top(scale.format) for scale in spec.scales[:-1]))
    return _or_one(scale.to(dtype_of(last.format)).float()).to(dtype_of(last.format))


def _top(format_: str) -> float:
    """The largest inner scale under an outer one: the largest number of an 8-bit format with a mantissa, or of whole
    numbers; else 1.
    """
    dtype = dtype_of(format_)
    if not dtype.is_floating_point:
        return float(torch.iinfo(dtype).max)
    return torch.finfo(dtype).max if dtype.itemsize == 1 and format_ != _E8M0 else 1.0


def _rounded(numbers: torch.Tensor, format_: str) -> torch.Tensor:
    """Float32 ``numbers`` in the format of scales: whole ones to the nearest."""
    dtype = dtype_of(format_)
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype)


def _spread(per_block: torch.Tensor, scale: Scale, shape: torch.Size) -> torch.Tensor:
    """Values of blocks, repeated for each row and column of a matrix of ``shape``."""
    n, k = _whole(scale.block, shape)
    return per_block.repeat_interleave(n, dim=0)[: shape[0]].repeat_interleave(k, dim=1)[:, : shape[1]]


def _whole(block: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a block; -1 is all of them."""
    return shape[0] if block[0] == -1 else block[0], shape[1] if block[1] == -1 else block[1]


def _quantize_level(weight: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """``quantize_weight`` for one level of scales over groups of neighbours."""
    rows, columns = weight.shape
    n, k = _whole(spec.scales[0].block, weight.shape)
    most = elements_at_once(weight.device) // columns
    height = max(n if n < rows else 1, most // n * n if n < rows else most)
    fitted = None
    if n == rows > height:  # the range of a column is that of its parts' extremes
        extremes = [extreme for part in weight.split(height) for extreme in (part.amin(0), part.amax(0))]
        fitted = _fit(_blocks(torch.stack(extremes), len(extremes), k), spec, (1, 3))
    slots: dict[str, torch.Tensor] = {}
    for start in range(0, rows, height):
        part = weight[start : start + height]
        blocks = _blocks(part, min(n, part.shape[0]) if fitted else n, k)
        scale, zero_point = fitted or _fit(blocks, spec, (1, 3))
        scale = scale.to(dtype_of(spec.scales[0].format))
        blocks.div_(scale.float())
        codes = spec.number_format.encode(blocks if zero_point is None else blocks.add_(zero_point))
        codes = codes.flatten(2).flatten(0, 1)[: part.shape[0], :columns]
        found = {
            "weight": pack_nibbles(codes) if spec.packing == "nibbles" else codes,
            scale_slot(0): scale[:, 0, :, 0],
        }
        if zero_point is not None:
            found["weight_zero_point"] = zero_point[:, 0, :, 0]
        for name, value in found.items():
            per = 1 if name == "weight" else n
            if name not in slots:
                slots[name] = value.new_empty(-(-rows // per), value.shape[1])
            slots[name][start // per : start // per + value.shape[0]] = value
    return slots


def calibrate(x: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """The slots that a spec of activations takes from the checkpoint, as activations ``x`` [T, K] would have them.

    That is ``input_scale`` and ``input_zero_point`` where scales are static, and ``input_scale_2`` where there are two
    levels, each [1]; none for others.
    """
    if spec.is_plain:
        return {}
    wide, slots = x.float(), {}
    if len(spec.scales) == 2:
        slots[scale_slot(1, "input")] = outer = _outer_scale(wide, replace(spec, scales=(spec.scales[0], _ALL))).view(1)
        wide = wide / outer
    if spec.static:
        scale, zero_point = _fit(wide, replace(spec, scales=(_ALL,)), (0, 1))
        slots[scale_slot(0, "input")] = scale.view(1)
        if zero_point is not None:
            slots["input_zero_point"] = zero_point.view(1)
    return slots


def _blocks(part: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """[rows, K] -> float32 [rows / n, n, K / k, k], a copy, filled up with zeros, which are exact in any block."""
    rows, columns = part.shape
    wide = part.new_zeros(rows + -rows % n, columns + -columns % k, dtype=torch.float32)
    wide[:rows, :columns] = part
    blocks: torch.Tensor = wide.unflatten(1, (-1, k)).unflatten(0, (-1, n))
    return blocks


def _fit(blocks: torch.Tensor, spec: QuantSpec, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scales (and zero points) with which each block of float32 ``blocks`` just fits the element's range."""
    if not spec.zero_point:
        top, bottom = blocks.amax(dims, keepdim=True), blocks.amin(dims, keepdim=True)
        if spec.element in _REACH_BELOW and dtype_of(spec.scales[0].format).itemsize > 1:
            extreme = torch.where(top > -bottom, top, bottom)
            return _stored(divided(extreme, spec.number_format.values[0]), spec.scales[0].format), None
        return _scale(torch.maximum(top, -bottom), spec), None
    if not spec.number_format.takes_zero_point:
        raise ValueError(f"{spec}: zero points need elements that are consecutive whole numbers")
    low, high = (int(spec.number_format.values[end]) for end in (0, -1))
    smallest = blocks.amin(dims, keepdim=True).clamp(max=0.0)  # zero stays exact
    scale = divided(blocks.amax(dims, keepdim=True).clamp(min=0.0) - smallest, high - low)
    if dtype_of(spec.scales[0].format).itemsize == 1:  # so coarse that zero points have to follow it
        scale = _rounded_up(scale, spec.scales[0].format)
    scale = _or_one(scale)
    zero_point = (low - smallest / scale).round().clamp(low, high)
    return scale, zero_point.to(dtype_of(spec.zero_point_dtype))


def _scale(amax: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The scale, float32, that maps ``amax`` to the largest element."""
    format_, top = spec.scales[0].format, spec.number_format.largest
    if format_ == _E8M0:  # OCP Microscaling Formats (MX) specification 1.0, section 6.3
        exponent = torch.frexp(amax).exponent - math.frexp(top)[1]
        scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
        return torch.where(amax > 0, scale, 1.0) + 0 * amax  # NaN stays NaN
    return _stored(divided(amax, top), format_)


def _stored(scale: torch.Tensor, format_: str) -> torch.Tensor:
    """Float32 ``scale`` as its format holds it; 1 where that is zero."""
    return _or_one(scale if format_ == "float32" else _rounded(scale, format_).float())


def _rounded_up(scale: torch.Tensor, format_: str) -> torch.Tensor:
    """Float32 ``scale`` as 8 bits hold it, not below what it is, so that the range still fits."""
    dtype = dtype_of(format_)
    if format_ == _E8M0:
        mantissa, exponent = torch.frexp(scale)
        powers = torch.ldexp(torch.ones_like(scale), (exponent - (mantissa == 0.5).int()).clamp(-127, 127))
        return torch.where(scale > 0, powers, scale)
    nearest = scale.to(dtype).float()
    above = (scale * (1 + torch.finfo(dtype).eps)).clamp(max=torch.finfo(dtype).max).to(dtype).float()
    return torch.where(nearest < scale, above, nearest)


def divided(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """``x`` over a number, as division rounds it. By what is no tensor, torch may multiply with the inverse instead."""
    return x / x.new_full((), divisor)


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    """``scale``, 1 where it is zero: a block of zeros, or of numbers too small for the scale's format."""
    return torch.where(scale == 0, 1.0, scale)
