"""Matrices as GGUF files hold them, written bit by bit with nothing of the reader's code.

Layouts: ``ggml-common.h`` of https://github.com/ggml-org/ggml. A block is written from drawn codes, scales and minima;
the numbers that it means are computed from these.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

_Block = tuple[bytes, list[float]]
"""A block's bytes, and its numbers."""
_Draw = Callable[[int, int], list[int]]
"""Draws so many whole numbers below a limit."""


def write_blocks(
    name: str, columns: int, block: Callable[[_Draw], _Block]
) -> Callable[[int, int, torch.Generator], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """A writer of matrices [N, K] of blocks of so many ``columns``: uint8 [N, K / columns, bytes] under ``name``."""

    def write(rows: int, width: int, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        def draw(count: int, below: int) -> list[int]:
            drawn: list[int] = torch.randint(below, (count,), generator=generator).tolist()
            return drawn

        made = [[block(draw) for _ in range(width // columns)] for _ in range(rows)]
        stored = torch.tensor([[list(content) for content, _ in row] for row in made], dtype=torch.uint8)
        numbers = torch.tensor([[number for _, values in row for number in values] for row in made])
        return {name: stored}, numbers

    return write


def _half(drawn: int) -> tuple[bytes, float]:
    """A scale between 2^-9 and 2^-6, of whole 2^-18, in float16; and its value."""
    value = (512 + drawn) / 2**18
    return struct.pack("<e", value), value


def q4_0(draw: _Draw) -> _Block:
    """A scale, and 32 nibbles: byte j has the elements j and 16 + j."""
    codes, (scale, d) = draw(32, 16), _half(draw(1, 512)[0])
    return scale + bytes(codes[j] | codes[16 + j] << 4 for j in range(16)), [d * (code - 8) for code in codes]


def q8_0(draw: _Draw) -> _Block:
    """A scale, and 32 bytes in two's complement."""
    codes, (scale, d) = [code - 128 for code in draw(32, 256)], _half(draw(1, 512)[0])
    return scale + struct.pack("<32b", *codes), [d * code for code in codes]


def q4_k(draw: _Draw) -> _Block:
    """d and dmin, eight scales and minima of six bits, and 256 nibbles: of each 64 the first 32 are the low ones."""
    codes, scales, minima = draw(256, 16), draw(8, 64), draw(8, 64)
    (first, d), (second, dmin) = _half(draw(1, 512)[0]), _half(draw(1, 512)[0])
    twelve = [scales[j] | scales[4 + j] >> 4 << 6 for j in range(4)]
    twelve += [minima[j] | minima[4 + j] >> 4 << 6 for j in range(4)]
    twelve += [scales[4 + j] & 15 | (minima[4 + j] & 15) << 4 for j in range(4)]
    nibbles = [codes[64 * part + j] | codes[64 * part + 32 + j] << 4 for part in range(4) for j in range(32)]
    numbers = [d * scales[i // 32] * code - dmin * minima[i // 32] for i, code in enumerate(codes)]
    return first + second + bytes(twelve) + bytes(nibbles), numbers


def q6_k(draw: _Draw) -> _Block:
    """Low four bits, high two bits, sixteen scales in two's complement, d. Halves of 128 elements are alike."""
    codes, scales, (last, d) = draw(256, 64), [s - 128 for s in draw(16, 256)], _half(draw(1, 512)[0])
    low, high = [], []
    for half in (codes[:128], codes[128:]):
        low += [half[j] & 15 | (half[64 + j] & 15) << 4 for j in range(64)]
        high += [sum((half[32 * part + j] >> 4) << (2 * part) for part in range(4)) for j in range(32)]
    numbers = [d * scales[i // 16] * (code - 32) for i, code in enumerate(codes)]
    return bytes(low) + bytes(high) + struct.pack("<16b", *scales) + last, numbers
