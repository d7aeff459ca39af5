"""Rotary position embedding of queries and keys.

Axes: T tokens, H query heads, K KV heads, D head size, R rotated elements, P tabulated positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, q: torch.Tensor, k: torch.Tensor, rotary: int, positions: int, interleaved: bool) -> Case:
        where = draw.integers(0, positions, q.shape[0])
        args, scalars = (q, k, where, random_table(draw, positions, rotary)), {"interleaved": interleaved}
        return Case(name, args, scalars, {"head_size": q.shape[-1]})

    for interleaved in (False, True):
        suffix = "_interleaved" if interleaved else ""
        yield case("random" + suffix, draw.normal(7, 4, 64), draw.normal(7, 2, 64), 64, 40, interleaved)
        yield case("partial" + suffix, draw.normal(5, 3, 80), draw.normal(5, 1, 80), 32, 40, interleaved)
        yield case("decode" + suffix, draw.normal(1, 8, 128), draw.normal(1, 8, 128), 128, 40_000, interleaved)
        merged = draw.normal(6, 7, 64)  # q, k and v as a merged projection leaves them
        yield case("strided" + suffix, merged[:, :4], merged[:, 4:6], 64, 40, interleaved)
        yield case("empty" + suffix, draw.normal(0, 4, 64), draw.normal(0, 2, 64), 64, 40, interleaved)
    yield case("large", draw.normal(4, 2, 64, scale=1e4), draw.normal(4, 2, 64, scale=1e4), 64, 40, False)


def random_table(draw: Draw, positions: int, rotary: int) -> torch.Tensor:
    """A table [P, R] of random angles' cosines and sines, float32."""
    angles = draw.floats(positions, rotary // 2) * 6.28
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _allocate(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@custom_op(
    cases=_cases,
    errors=ErrorModel(scale="row", accumulated=1.15),  # one rounding, and none of the table: that would make it 1.3
    allocate=_allocate,
    aliases=[(0, "q"), (1, "k")],
    static=["interleaved"],
    fusible=True,
)
def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, H, D] and k [T, K, D] by their positions' angles (Su et al. 2021, arXiv:2104.09864).

    ``positions`` int64 [T] are rows of ``cos_sin`` float32 [P, R]: R/2 cosines, then R/2 sines. The first R of D
    elements rotate, in pairs (i, i + R/2), or (2i, 2i + 1) if ``interleaved``; the rest pass through. Computed in
    float32 or wider. ``q`` and ``k`` may be written to if the outputs are they. Positions and table are complete before
    the kernel that produces q and k begins: one that is launched early reads them while that kernel still runs.
    """
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, H, D] by cos, sin [T, 1, R/2]."""
    turning, still = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined.to(x.dtype), still], dim=-1)
