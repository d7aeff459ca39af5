"""Rounding to a spec's elements: activations while a step runs, weights while a checkpoint loads.

The way back is ``hardpoint_plugin_api.dequantize``. A tensor is viewed as blocks, each with a scale of its own:
scales have the shape of the view, with size 1 along what a block extends over, so that they broadcast. Axes: T
tokens, N rows, K columns, n x k a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import QuantSpec, decode_elements, scale_slot

_INTEGERS = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15)}
_FLOATS = {
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
    "float4_e2m1": 6.0,
}
ELEMENTS = frozenset({*_INTEGERS, *_FLOATS})
"""The elements that can be rounded to and read back."""

_E8M0 = "float8_e8m0fnu"
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_CHUNK = 1 << 19
"""Elements of a weight that are worked on at once: 2 MiB of float32 each, beside a matrix of any size. With fewer, the
calls cost more than the work: on two busy cores, 64 Ki took eight times as long for int8."""


def is_integer(element: str) -> bool:
    """Whether an element's codes are whole numbers, so that it may have zero points."""
    return element in _INTEGERS


def largest(element: str) -> float:
    """The largest magnitude that a symmetric scale maps to: 127 of int8, not 128, so that both signs reach as far."""
    return float(_INTEGERS[element][1]) if element in _INTEGERS else _FLOATS[element]


def step(element: str) -> float:
    """The largest distance of two neighbouring elements, as a share of ``largest``."""
    if element in _INTEGERS:
        return 1 / largest(element)
    if element == "float4_e2m1":
        return 2 / largest(element)
    return torch.finfo(dtype_of(element)).eps


def round_to(x: torch.Tensor, element: str) -> torch.Tensor:
    """Round float32 ``x`` to the nearest element (ties to even), saturating; codes in uint8 for four-bit floats."""
    if element in _INTEGERS:
        low, high = _INTEGERS[element]
        return x.round().clamp_(low, high).to(torch.uint8 if element.startswith("uint") else torch.int8)
    if element != "float4_e2m1":
        return x.clamp(-_FLOATS[element], _FLOATS[element]).to(dtype_of(element))
    # A tie goes to the even code: down at the first midpoint, up at the second, and so on.
    bounds = torch.tensor(_E2M1_MIDPOINTS)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(()))
    codes = torch.bucketize(x.abs(), bounds.to(x.device))
    return (codes | (x.signbit().long() << 3)).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] of four bits each, in any integer dtype -> uint8 [..., K / 2], the low nibble first."""
    nibbles = codes.to(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


@dataclass(frozen=True)
class Rounded:
    """What ``quantize_rows`` makes: elements one by one in the input's shape, and scales in that of its blocks.

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
    return Rounded(_joined(round_to(scaled, spec.element), x.shape), scale, zero_point)


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
    """Round a weight [N, K] to the nearest elements of a spec with one level of scales; returns the spec's slots.

    Works on a few rows at a time, on the weight's device. A block at the edge may be smaller than the others.
    """
    rows, columns = weight.shape
    n, k = (whole if size == -1 else size for size, whole in zip(spec.scales[0].block, weight.shape, strict=True))
    height = max(n if n < rows else 1, _CHUNK // columns // n * n if n < rows else _CHUNK // columns)
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
        codes = round_to(blocks if zero_point is None else blocks.add_(zero_point), spec.element)
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
        return _scale(torch.maximum(top, -bottom), spec), None
    low, high = _INTEGERS[spec.element]
    smallest = blocks.amin(dims, keepdim=True).clamp(max=0.0)  # zero stays exact
    scale = _or_one(divided(blocks.amax(dims, keepdim=True).clamp(min=0.0) - smallest, high - low))
    zero_point = (low - smallest / scale).round().clamp(low, high)
    return scale, zero_point.to(dtype_of(spec.zero_point_dtype))


def _scale(amax: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The scale, float32, that maps ``amax`` to the largest element."""
    format_, top = spec.scales[0].format, largest(spec.element)
    if format_ == _E8M0:  # OCP Microscaling Formats (MX) specification 1.0, section 6.3
        exponent = torch.frexp(amax).exponent - torch.frexp(torch.tensor(top)).exponent.to(amax.device)
        scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
        return torch.where(amax > 0, scale, 1.0) + 0 * amax  # NaN stays NaN
    scale = divided(amax, top)
    return _or_one(scale if format_ == "float32" else scale.to(dtype_of(format_)).float())


def divided(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """``x`` over a number, as division rounds it. By what is no tensor, torch may multiply with the inverse instead."""
    return x / x.new_full((), divisor)


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    """``scale``, 1 where it is zero: a block of zeros, or of numbers too small for the scale's format."""
    return torch.where(scale == 0, 1.0, scale)
