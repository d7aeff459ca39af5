"""The layout of 4-bit weights for products on matrix units: *tiles* of 16 rows.

A tile has 16 rows and 256 columns (128 for groups of 16 or 32), which lie side by side in memory. Each word of a tile's
row has eight codes: of its lower and its upper half, the codes at the same *place* (0 to 3) are those of neighbouring
columns, and what one place of all words of a row holds are neighbours, a quarter of the tile. So a product's step takes
one place of the words, and a group is a whole number of steps.

Zero points of groups are stored as what a product's multiply-add adds, ``-zero point * step``, for each quarter of a
tile.

Axes: N rows of the weight (out), K columns (in), B blocks of 16 rows, T tiles of a row, W words of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.nn.functional import pad

from hardpoint.numerics import pack_nibbles
from hardpoint_plugin_api import QuantSpec, Reason, Scale, dequantize

TILE_ROWS = 16
STEP = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1.0}
"""The value of code one: a factor that matrix units' elements can bring the smallest numbers to."""

_LARGEST_TILE = 256


def tile_columns(group: int) -> int:
    """The columns of a tile, a quarter of which has one scale, or two of groups of 16."""
    return 128 if group in (16, 32) else _LARGEST_TILE


def unsupported_groups(spec: QuantSpec, columns: int) -> list[Reason]:
    """Refuse groups that are no whole number of places in a tile, or of tiles, or end within the last group."""
    group = spec.scales[0].block[1]
    short = (16,) if spec.element == "float4_e2m1" else ()
    groups = (*short, 32, 64, 128)
    fits = group == -1 or (columns % group == 0 and (group in groups or group % _LARGEST_TILE == 0))
    supported = f"{', '.join(map(str, groups))} or multiples of {_LARGEST_TILE}, that divide the columns"
    wanted = f"{group} of {columns}"
    return [] if fits else [Reason("group", "groups of columns", wanted=wanted, supported=supported)]


@dataclass(frozen=True)
class FourBitTiles:
    """Weights of ``spec`` and ``columns``, for activations of ``dtype``."""

    spec: QuantSpec
    columns: int
    dtype: torch.dtype

    @cached_property
    def group(self) -> int:
        """Columns that share a scale; 0: all of a row."""
        return max(self.spec.scales[0].block[1], 0)

    @cached_property
    def tile(self) -> int:
        """Columns of a tile."""
        return tile_columns(self.group)

    @cached_property
    def flip(self) -> int:
        """The bit of a code that is a sign, if any: with it flipped, codes count from 0 to 15."""
        return 8 if self.spec.element == "int4" else 0

    @cached_property
    def is_e2m1(self) -> bool:
        """Whether codes are 4-bit floats."""
        return self.spec.element == "float4_e2m1"

    @property
    def _parts(self) -> int:
        """The groups that a tile has, whole ones, or 1."""
        return self.tile // self.group if 0 < self.group <= self.tile else 1

    @property
    def _groups(self) -> int:
        return self.columns // self.group if self.group else 1

    def packed(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``weight``: int32 [B, T, 16, W]; ``weight_scale`` [T, N, scales]; ``weight_zero_point`` [T, N, 4], as x is.

        Of scales and zero points tiles come first, so that rows that are worked on together have theirs side by side,
        each row those of a tile's groups (up to four); for scales, groups that are longer than a tile stand in place
        of tiles. Zero points are those of a tile's quarters, times the step that codes from 0 to 15 have, and negative.
        """
        stored = weights["weight"]
        codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)[:, : self.columns] ^ self.flip
        whole = pad(codes, (0, -self.columns % self.tile, 0, -len(codes) % TILE_ROWS))
        places = whole.unflatten(1, (-1, 2, 2, self.tile // 8, 2))
        octets = places[:, :, :, 0] | (places[:, :, :, 1] << 4)
        words = octets.permute(0, 1, 3, 4, 2).flatten(2).contiguous().view(torch.int32)
        scales = weights["weight_scale"]
        packed = {
            "weight": words.unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous(),
            "weight_scale": self._scales_by_tiles(scales.view(torch.uint8) if scales.itemsize == 1 else scales),
        }
        if len(self.spec.scales) == 2:
            packed["weight_scale_2"] = weights["weight_scale_2"].float().expand(len(stored), 1)[:, 0].contiguous()
        if self.spec.zero_point:
            zero_points = weights["weight_zero_point"].short() + self.flip
            packed["weight_zero_point"] = self._zero_points_by_quarters(zero_points)
        return packed

    def _scales_by_tiles(self, scales: torch.Tensor) -> torch.Tensor:
        """[N, G] -> [T, N, scales of a tile]."""
        records: torch.Tensor = pad(scales, (0, -scales.shape[1] % self._parts)).unflatten(1, (-1, self._parts))
        return records.transpose(0, 1).contiguous()

    def _zero_points_by_quarters(self, zero_points: torch.Tensor) -> torch.Tensor:
        """[N, G] -> the numbers added for the zero points, [T, N, 4]."""
        tiles = -(-self.columns // self.tile)
        quarters = zero_points.repeat_interleave(4 * self.group // self.tile or 4 * tiles, 1)
        whole = pad(quarters, (0, 4 * tiles - quarters.shape[1])).unflatten(1, (tiles, 4)).transpose(0, 1)
        added: torch.Tensor = whole.to(self.dtype) * -STEP[self.dtype]
        return added.contiguous()

    def unpacked(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        """The dequantized weight [N, K] of what ``packed`` returned."""
        words = packed["weight"].transpose(1, 2).flatten(0, 1)
        return self._numbers(packed | {"weight": words[: packed["weight_scale"].shape[1]]})

    def rows(self, packed: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """``unpacked``, of the rows ``ids`` alone."""
        blocks, within = ids // TILE_ROWS, ids % TILE_ROWS
        found = {name: value[:, ids] for name, value in packed.items() if value.ndim == 3}
        found |= {name: value[ids] for name, value in packed.items() if value.ndim == 1}
        return self._numbers(found | {"weight": packed["weight"][blocks, :, within]})

    def _numbers(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of some rows, whose words are [rows, T, W]."""
        octets = packed["weight"].contiguous().view(torch.uint8).unflatten(2, (-1, 2, 2)).permute(0, 1, 4, 2, 3)
        codes = torch.stack((octets & 0xF, octets >> 4), dim=3).flatten(1)[:, : self.columns]
        slots = {
            "weight": pack_nibbles(pad(codes, (0, self.columns % 2)) ^ self.flip),
            "weight_scale": packed["weight_scale"].transpose(0, 1).flatten(1)[:, : self._groups],
        }
        spec = self.spec
        if self.is_e2m1:
            slots["weight_scale"] = slots["weight_scale"].contiguous().view(getattr(torch, spec.scales[0].format))
        if "weight_scale_2" in packed:
            slots["weight_scale_2"] = packed["weight_scale_2"][:, None]
            spec = replace(spec, scales=(spec.scales[0], Scale("float32", (1, -1))))
        if self.spec.zero_point:
            quarters = packed["weight_zero_point"].transpose(0, 1).flatten(1) / -STEP[self.dtype]
            first_of_group = quarters[:, :: 4 * self.group // self.tile or quarters.shape[1]]
            slots["weight_zero_point"] = first_of_group[:, : self._groups].short() - self.flip
        return dequantize(slots, spec, self.dtype)[:, : self.columns]
