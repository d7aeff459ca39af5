"""The blocks of GGUF's quantized types, taken apart into the slots of specs.

Layouts: ``ggml-common.h`` and ``ggml-quants.c`` of https://github.com/ggml-org/ggml. A block holds the elements, scales
and minima of 32 or 256 neighbours of a row. K-quants have two levels: ``w = (d * scale) * q - (dmin * minimum)``, with
d and dmin for 256 columns, and whole-numbered scales and minima for 16 or 32. Axes: R rows, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hardpoint.numerics import pack_nibbles
from hardpoint_plugin_api import QuantSpec, Scale, dequantize

Slots = dict[str, torch.Tensor]
_PIECE = 1 << 20
"""Elements that are taken apart at once, in about ten bytes each."""


@dataclass(frozen=True)
class BlockType:
    """The spec of a type's numbers, and how blocks uint8 [R, B, bytes] are taken apart into its slots."""

    spec: QuantSpec
    take_apart: Callable[[torch.Tensor], Slots]

    def slots(self, blocks: torch.Tensor) -> Slots:
        """The slots of a matrix, new tensors."""
        return by_pieces(blocks, self.take_apart)

    def numbers(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [R, columns] in ``dtype``, a new tensor."""
        read = by_pieces(blocks, lambda some: {"weight": dequantize(self.take_apart(some), self.spec, dtype)})
        return read["weight"]


def by_pieces(blocks: torch.Tensor, read: Callable[[torch.Tensor], Slots]) -> Slots:
    """``read`` some rows of ``blocks`` at a time, so that no more than those is in memory beside the results."""
    height = max(1, _PIECE // max(1, 2 * blocks[0].numel())) if len(blocks) else 1
    found: Slots = {}
    for start in range(0, max(1, len(blocks)), height):
        piece = blocks[start : start + height]
        for name, value in read(piece).items():
            if name not in found:
                found[name] = value.new_empty(len(blocks), *value.shape[1:])
            found[name][start : start + len(piece)] = value
    return found


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    """[R, B, 2] -> float16 [R, B]."""
    return two_bytes.contiguous().view(torch.float16).squeeze(-1)


def _bits(stored: torch.Tensor, bits: int, per: int) -> torch.Tensor:
    """Fields of ``bits`` of [R, B, n]: of each ``per`` bytes the lowest field of all, then the next of all, ..."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=stored.device)
    fields = (stored.unflatten(-1, (-1, 1, per)) >> shifts[:, None]) & ((1 << bits) - 1)
    flat: torch.Tensor = fields.flatten(-3)
    return flat


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [R, B, n] -> a packed matrix [R, B * n / 2]."""
    return pack_nibbles(codes.flatten(1))


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """Codes of 5 or 6 bits as numbers, int8 [R, B * n]."""
    return (codes.to(torch.int8) - zero).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Slots:
    codes = _bits(blocks[..., 2:], 4, 16)
    return {"weight": _nibbles(codes ^ 8), "weight_scale": _half(blocks[..., :2])}


def _q4_1(blocks: torch.Tensor) -> Slots:
    scale, minimum = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return {"weight": _nibbles(_bits(blocks[..., 4:], 4, 16)), "weight_scale": scale, "weight_min": minimum}


def _five_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Four bytes with the fifth bit of 32 elements, one after the other, then their nibbles."""
    high = _bits(blocks[..., :4], 1, 1)
    return _bits(blocks[..., 4:], 4, 16) | high << 4


def _q5_0(blocks: torch.Tensor) -> Slots:
    return {"weight": _signed(_five_bits(blocks[..., 2:]), 16), "weight_scale": _half(blocks[..., :2])}


def _q5_1(blocks: torch.Tensor) -> Slots:
    scale, minimum = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return {"weight": _five_bits(blocks[..., 4:]).flatten(1), "weight_scale": scale, "weight_min": minimum}


def _q8_0(blocks: torch.Tensor) -> Slots:
    return {"weight": blocks[..., 2:].flatten(1).view(torch.int8), "weight_scale": _half(blocks[..., :2])}


def _two_levels(
    weight: torch.Tensor, scale: torch.Tensor, d: torch.Tensor, minimum: torch.Tensor | None = None
) -> Slots:
    """``scale`` and ``minimum`` [R, B, n]; ``d`` [R, B, 2] or [R, B, 4], d and dmin."""
    found = {"weight": weight, "weight_scale": scale.flatten(1), "weight_scale_2": _half(d[..., :2])}
    if minimum is not None:
        found |= {"weight_min": minimum.flatten(1), "weight_min_2": -_half(d[..., 2:])}
    return found


def _q2_k(blocks: torch.Tensor) -> Slots:
    both, codes, d = blocks.split((16, 64, 4), dim=-1)
    return _two_levels(_nibbles(_bits(codes, 2, 32)), both & 0xF, d, both >> 4)


def _q3_k(blocks: torch.Tensor) -> Slots:
    high, low, scales, d = blocks.split((32, 64, 12, 2), dim=-1)
    codes = _bits(low, 2, 32) | _bits(high, 1, 32) << 2  # 4 to 7 stand for 0 to 3, and 0 to 3 for -4 to -1
    scale = _bits(scales[..., :8], 4, 8) | _bits(scales[..., 8:], 2, 4) << 4
    return _two_levels(_nibbles((codes ^ 4) & 7), scale.to(torch.int8) - 32, d)


def _scales_and_minima(twelve: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight of each, of six bits: the first four whole, of the others four bits apart and two atop the first."""
    scale, minimum, low = twelve.split(4, dim=-1)
    scales = torch.cat([scale & 0x3F, low & 0xF | scale >> 6 << 4], dim=-1)
    return scales, torch.cat([minimum & 0x3F, low >> 4 | minimum >> 6 << 4], dim=-1)


def _q4_k(blocks: torch.Tensor) -> Slots:
    d, twelve, codes = blocks.split((4, 12, 128), dim=-1)
    scale, minimum = _scales_and_minima(twelve)
    return _two_levels(_nibbles(_bits(codes, 4, 32)), scale, d, minimum)


def _q5_k(blocks: torch.Tensor) -> Slots:
    d, twelve, high, low = blocks.split((4, 12, 32, 128), dim=-1)
    scale, minimum = _scales_and_minima(twelve)
    codes = _bits(low, 4, 32) | _bits(high, 1, 32) << 4
    return _two_levels(codes.flatten(1), scale, d, minimum)


def _q6_k(blocks: torch.Tensor) -> Slots:
    low, high, scales, d = blocks.split((128, 64, 16, 2), dim=-1)
    codes = _bits(low, 4, 64) | _bits(high, 2, 32) << 4
    return _two_levels(_signed(codes, 32), scales.contiguous().view(torch.int8), d)


def _iq4_nl(blocks: torch.Tensor) -> Slots:
    return {"weight": _nibbles(_bits(blocks[..., 2:], 4, 16)), "weight_scale": _half(blocks[..., :2])}


def _iq4_xs(blocks: torch.Tensor) -> Slots:
    d, high, low, codes = blocks.split((2, 2, 4, 128), dim=-1)
    scale = _bits(low, 4, 1) | _bits(high, 2, 1) << 4
    return _two_levels(_nibbles(_bits(codes, 4, 16)), scale.to(torch.int8) - 32, d)


def _mxfp4(blocks: torch.Tensor) -> Slots:
    scale = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)
    return {"weight": _nibbles(_bits(blocks[..., 1:], 4, 16)), "weight_scale": scale}


def _one(element: str, minimum: bool = False, scale: str = "float16") -> QuantSpec:
    return QuantSpec(element, scales=(Scale(scale, (1, 32)),), minimum=minimum)


def _two(element: str, scale: str, columns: int, minimum: bool = False) -> QuantSpec:
    levels = (Scale(scale, (1, columns)), Scale("float16", (1, 256)))
    return QuantSpec(element, scales=levels, minimum=minimum)


SPECS: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_one("int4"), _q4_0),
    "Q4_1": BlockType(_one("uint4", minimum=True), _q4_1),
    "Q5_0": BlockType(_one("int5"), _q5_0),
    "Q5_1": BlockType(_one("uint5", minimum=True), _q5_1),
    "Q8_0": BlockType(_one("int8"), _q8_0),
    "Q2_K": BlockType(_two("uint2", "uint8", 16, minimum=True), _q2_k),
    "Q3_K": BlockType(_two("int3", "int8", 16), _q3_k),
    "Q4_K": BlockType(_two("uint4", "uint8", 32, minimum=True), _q4_k),
    "Q5_K": BlockType(_two("uint5", "uint8", 32, minimum=True), _q5_k),
    "Q6_K": BlockType(_two("int6", "int8", 16), _q6_k),
    "IQ4_NL": BlockType(_one("iq4_nl"), _iq4_nl),
    "IQ4_XS": BlockType(_two("iq4_nl", "int8", 32), _iq4_xs),
    "MXFP4": BlockType(_one("float4_e2m1", scale="float8_e8m0fnu"), _mxfp4),
}
"""By GGUF's name of the type."""
