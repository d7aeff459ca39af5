"""Each head's rows times the head's own matrix.

Axes: T rows, H heads, N elements of a row, L elements of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel

_TILE_ROWS = 16
"""As in batch_invariant_linear.py."""


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, rows: int, heads: int, inputs: int, outputs: int) -> Case:
        return Case(name, (draw.normal(rows, heads, inputs), draw.normal(heads, inputs, outputs, scale=inputs**-0.5)))

    yield case("random", 9, 4, 32, 48)
    yield case("one_row", 1, 16, 64, 40)
    yield case("one_head", 20, 1, 128, 15)
    yield case("odd", 17, 3, 13, 7)
    yield case("many_rows", 130, 2, 24, 16)
    yield case("long", 3, 2, 2048, 8)
    yield case("empty", 0, 3, 8, 8)
    x, weights = case("", 6, 3, 16, 24).args
    yield Case("strided", (draw.normal(6, 3, 40)[..., 5:21], draw.normal(3, 24, 16).mT))
    yield Case("heads_first", (x.transpose(0, 1).contiguous().transpose(0, 1), weights))
    yield Case("non_finite_input", (draw.with_nan(15, 16).view(5, 3, 16), weights))


@custom_op(cases=_cases, errors=ErrorModel())
def multiply_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [T, H, N] times ``weights`` [H, N, L] -> [T, H, L], in any strides. Sums are float32 or wider."""
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)


def in_tiles(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``multiply_heads`` by products that all have as many rows: the batch has no say in a row's result."""
    given = (x.shape[1], *weights.shape[1:], weights.stride(), x.dtype, x.device, torch.get_num_threads())
    rows = _TILE_ROWS if _rows_are_alike(*given) else 1
    out = x.new_empty(*x.shape[:2], weights.shape[2])
    tile = x.new_zeros(x.shape[1], rows, x.shape[2])  # of its own: alignment may choose the kernel, too
    for first in range(0, x.shape[0], rows):
        some = x[first : first + rows]
        tile[:, : len(some)] = some.transpose(0, 1)
        out[first : first + rows] = torch.bmm(tile, weights)[:, : len(some)].transpose(0, 1)
    return out


@functools.cache
def _rows_are_alike(
    heads: int,
    inputs: int,
    outputs: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
) -> bool:
    """Whether a row's product has the same bits wherever it stands in a tile, for matrices of these sizes."""
    generator = torch.Generator().manual_seed(0)
    places = sum((size - 1) * abs(stride) for size, stride in zip((heads, inputs, outputs), strides, strict=True)) + 1
    memory = torch.randn(places, generator=generator).to(device, dtype)
    row = torch.randn(heads, 1, inputs, generator=generator).to(device, dtype)
    y = torch.bmm(row.repeat(1, _TILE_ROWS, 1), memory.as_strided((heads, inputs, outputs), strides))
    return torch.equal(y, y[:, :1].expand_as(y))
