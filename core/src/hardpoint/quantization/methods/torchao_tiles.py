"""torchao's ``Int4TilePackedTo4dTensor``: 4-bit weights in the tiles of a matrix instruction of 16 x 8 x 16.

``qdata`` int32 [N / 8, K / 128, 32, 4] is made by ``_convert_weight_to_int4pack`` of PyTorch (``int4mm.cu``, the layout
with 32 lanes); N is padded to a multiple of 8, K to one of 1024. Lane t has row t / 4. Its word j has eight of the 32
columns from 32 j: of the pairs 4 i + t % 4 (i from 0 to 3) the first columns in the low four nibbles, the second ones
in the others. A nibble is q + 8.

``scale_and_zero`` bfloat16 [K / g, N, 2], padded likewise. ``w = q * scale + zero``, q from -8 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint.numerics import pack_nibbles, unpack_nibbles
from hardpoint_plugin_api import Dim, Module, Scale, StoredTensor

_ROWS, _COLUMNS = 8, 1024
"""The multiples to which rows and columns are padded."""
_TILE = 128
"""Columns of four words."""


def stored_tiles(module: Module, scale: Scale) -> list[StoredTensor]:
    """The two tensors of ``module``, whose groups have ``scale``. Ranks cannot divide what is padded."""
    rows, columns, group = module.out_features, module.in_features, scale.block[1]
    padded_rows, padded_columns = -(-rows // _ROWS) * _ROWS, -(-columns // _COLUMNS) * _COLUMNS
    if (padded_rows, padded_columns) == (rows, columns):
        tiles: tuple[Dim, ...] = (Dim("out", _ROWS), Dim("in", _COLUMNS, _COLUMNS // _TILE))
        groups: tuple[Dim, ...] = (Dim("in", group), Dim("out"))
    else:
        tiles = (Dim(None, padded_rows // _ROWS), Dim(None, padded_columns // _TILE))
        groups = (Dim(None, padded_columns // group), Dim(None, padded_rows))

    def elements(words: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"weight": pack_nibbles(in_rows(words)[:rows, :columns])}

    def numbers(both: torch.Tensor) -> Mapping[str, torch.Tensor]:
        own = both[: -(-columns // group), :rows]
        return {"weight_scale": own[..., 0].t(), "weight_min": own[..., 1].t()}

    return [
        StoredTensor("_weight_qdata", (*tiles, Dim(None, 32), Dim(None, 4)), ("int32",), ("weight",), elements),
        StoredTensor(
            "_weight_scale_and_zero", (*groups, Dim(None, 2)), (scale.format,), ("weight_scale", "weight_min"), numbers
        ),
    ]


def in_rows(words: torch.Tensor) -> torch.Tensor:
    """Words [N / 8, K / 128, 32, 4] -> signed elements [N, K], in the low four bits of uint8."""
    nibbles = unpack_nibbles(words.contiguous().view(torch.uint8))
    parts = nibbles.view(*words.shape[:2], _ROWS, 4, 4, 2, 4)  # tile of rows, tile of columns, row, t % 4, j, half, i
    rows = parts.permute(0, 2, 1, 4, 6, 3, 5).reshape(_ROWS * words.shape[0], _TILE * words.shape[1])
    return rows ^ 8
