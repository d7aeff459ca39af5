"""The layout of GGUF's blocks for products on matrix units: tiles of 16 rows and 128 columns.

Codes of 2 to 8 bits count from 0. The lowest four bits lie as in four_bit_tiles.py, eight codes in a word, of which the
codes at the same *place* (0 to 3) of all words of a row are neighbours. Bits 4 and 5 of codes of 5 and 6 bits lie in
half words beside: at place p of a half word, bits 2p and 2p + 1 of its lower and of its upper byte belong to the codes
at place p of the lower and the upper half of the word. So a code of five bits takes six here. The upper four bits of
codes of 7 and 8 bits lie in words beside, as the lower four do.

Scales and minima stay as stored, in two levels where there are two, and those of a tile's groups lie in one word.

Axes: N rows of the weight (out), K columns (in), B blocks of 16 rows, T tiles of a row, W words of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from hardpoint.dtypes import dtype_of
from hardpoint.numerics import pack_nibbles, unpack_nibbles
from hardpoint_plugin_api import QuantSpec, Reason, dequantize, minimum_slot, scale_slot

TILE_ROWS = 16
TILE_COLUMNS = 128
WORDS = TILE_COLUMNS // 8
OUTER_COLUMNS = 256
"""Columns of a scale of the second level."""

_GROUPS = (16, 32)
_SCALES = ("int8", "uint8", "float16")
_MOST_BITS = 8
_MOST_HIGH_BITS = 2
"""Bits above the lowest four that half words have room for."""
_RECORD_BITS = 64
_PIECE = 1 << 22
"""Elements that are laid out at once, in about twenty bytes each."""


def unsupported_blocks(spec: QuantSpec, columns: int) -> list[Reason]:
    """Refuse what is no block of GGUF's kinds: other elements and scales, and rows that end within a block."""
    element, inner = spec.number_format, spec.scales[0]
    group, last = inner.block[1], spec.scales[-1].block[1]
    bits = TILE_COLUMNS // group * dtype_of(inner.format).itemsize * 8 if group in _GROUPS else 0
    if element.bits > _MOST_BITS or not element.takes_zero_point:
        return [Reason("element", "elements", wanted=spec.element, supported=f"integers of 2 to {_MOST_BITS} bits")]
    if not 0 < bits <= _RECORD_BITS or inner.format not in _SCALES:
        wanted = f"{inner.format} for {group} columns"
        return [Reason("group", "scales", wanted=wanted, supported="int8 or uint8 for 16 columns, or float16 for 32")]
    if len(spec.scales) > 1 and last != OUTER_COLUMNS:
        return [Reason("outer", "outer scales", wanted=f"for {last} columns", supported=f"for {OUTER_COLUMNS} columns")]
    if columns % last:
        return [Reason("columns", "columns", wanted=str(columns), supported=f"multiples of {last}")]
    return []


@dataclass(frozen=True)
class BlockTiles:
    """Weights of ``spec`` and ``columns``, for activations of ``dtype``."""

    spec: QuantSpec
    columns: int
    dtype: torch.dtype

    @cached_property
    def group(self) -> int:
        """Columns that share a scale of the first level."""
        return self.spec.scales[0].block[1]

    @cached_property
    def bias(self) -> int:
        """The code that means zero."""
        element = self.spec.number_format
        return 1 << element.bits - 1 if element.storage == "int8" else 0

    @cached_property
    def is_signed(self) -> bool:
        """Whether scales of the first level are signed whole numbers."""
        return self.spec.scales[0].format == "int8"

    def packed(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``weight`` int32 [B, T, 16, W]; ``high`` of that shape, where codes have more than four bits: int16, int32 of
        more than six.

        ``weight_scale`` and ``weight_min`` are words [T, N] of 4 or 8 numbers, those of the second level
        [K / 256, N].
        """
        stored = weights["weight"]
        blocks, tiles = -(-len(stored) // TILE_ROWS), -(-self.columns // TILE_COLUMNS)
        packed = {"weight": stored.new_empty(blocks, tiles, TILE_ROWS, WORDS, dtype=torch.int32)}
        if (bits_above := self.spec.number_format.bits - 4) > 0:
            word = torch.int16 if bits_above <= _MOST_HIGH_BITS else torch.int32
            packed["high"] = stored.new_empty(packed["weight"].shape, dtype=word)
        height = max(1, _PIECE // (TILE_ROWS * tiles * TILE_COLUMNS))
        for first in range(0, blocks, height):
            codes = self._codes(stored[first * TILE_ROWS : (first + height) * TILE_ROWS])
            whole = pad(codes, (0, -self.columns % TILE_COLUMNS, 0, -len(codes) % TILE_ROWS)).int()
            # [blocks, rows, T, places, words, halves]: code 32 * place + 2 * word + half of a tile.
            places = whole.unflatten(1, (tiles, 4, WORDS, 2)).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2)
            for name, bits in (("weight", places & 0xF), ("high", places >> 4)):
                if name in packed:
                    shifted = bits << _shifts(packed[name].dtype, stored.device)
                    packed[name][first : first + height] = shifted.sum((3, 5), dtype=torch.int32)
        for slot in (scale_slot, minimum_slot) if self.spec.minimum else (scale_slot,):
            packed[slot(0)] = self._records(weights[slot(0)])
            if len(self.spec.scales) > 1:
                packed[slot(1)] = weights[slot(1)].t().contiguous()
        return packed

    def _codes(self, stored: torch.Tensor) -> torch.Tensor:
        """Stored elements as codes that count from 0, uint8 [N, K]."""
        codes = unpack_nibbles(stored) if self.spec.packing == "nibbles" else stored.view(torch.uint8)
        return (codes[:, : self.columns] & (1 << self.spec.number_format.bits) - 1) ^ self.bias

    def _records(self, numbers: torch.Tensor) -> torch.Tensor:
        """[N, groups] -> words [T, N] of a tile's numbers, the first in the lowest bits."""
        parts = TILE_COLUMNS // self.group
        whole = pad(numbers, (0, -numbers.shape[1] % parts)).unflatten(1, (-1, parts)).transpose(0, 1).contiguous()
        word = torch.int64 if parts * whole.itemsize == 8 else torch.int32
        records: torch.Tensor = whole.view(word).squeeze(-1)
        return records

    def unpacked(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        """The dequantized weight [N, K] of what ``packed`` returned."""
        return self.rows(packed, torch.arange(packed[scale_slot(0)].shape[1], device=packed["weight"].device))

    def rows(self, packed: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """``unpacked``, of the rows ``ids`` alone."""
        block, within = ids // TILE_ROWS, ids % TILE_ROWS

        def fields(name: str) -> torch.Tensor:
            words = packed[name][block, :, within].int()[:, :, None, :, None]
            return words >> _shifts(packed[name].dtype, ids.device) & (1 << packed[name].itemsize) - 1

        codes = fields("weight")
        if "high" in packed:
            codes = codes | fields("high") << 4
        codes = (codes.flatten(1)[:, : self.columns].to(torch.uint8) ^ self.bias).view(torch.uint8)
        slots = {"weight": pack_nibbles(codes) if self.spec.packing == "nibbles" else self._stored(codes)}
        for slot in (scale_slot, minimum_slot) if self.spec.minimum else (scale_slot,):
            words = packed[slot(0)][:, ids].t().flatten()
            numbers = words.view(dtype_of(self.spec.scales[0].format)).unflatten(0, (len(ids), -1))
            slots[slot(0)] = numbers[:, : self.columns // self.group]
            if len(self.spec.scales) > 1:
                slots[slot(1)] = packed[slot(1)][:, ids].t()
        return dequantize(slots, self.spec, self.dtype)

    def _stored(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes in two's complement as a byte each."""
        if not self.bias:
            return codes
        return ((codes ^ self.bias).short() - self.bias).to(torch.int8)


def _shifts(word: torch.dtype, device: torch.device) -> torch.Tensor:
    """Where the bits of a code lie in a word of 32 bits, or a half word of 16: int32 [places, 1, halves]."""
    place = torch.arange(4, device=device, dtype=torch.int32)[:, None, None] * word.itemsize
    return place + torch.arange(2, device=device, dtype=torch.int32) * (4 * word.itemsize)
