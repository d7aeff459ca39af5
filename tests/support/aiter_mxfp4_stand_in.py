"""AITER's product of 4-bit floats, computed on the host, and how it holds and rounds them; part of ``aiter_stand_in``.

Parameters, defaults and what it takes: aiter/ops/triton/gemm/basic/gemm_afp4wfp4.py at
01423766152c2cf08d7d7bdccae00a221f2da876 of github.com/ROCm/aiter; for scales aiter/utility/fp4_utils.py at
0b3d71613304c12fdc3e1a324d0f1a67a3875684 and aiter/ops/shuffle.py at 0122c48149c1f523bb5ca9154766bf795c1d371b.
Strides that its kernel takes for granted are checked, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hardpoint.numerics import unpack_nibbles
from tests.support.aiter_calls import count

_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def gemm_afp4wfp4(
    x: Tensor,
    w: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype | None = torch.bfloat16,
    y: Tensor | None = None,
    config: dict[str, Any] | None = None,
    skip_reduce: bool | None = False,
) -> Tensor:
    """x [M, K / 2], w [N, K / 2], scales [M, K / 32] and [N, K / 32] -> [M, N]."""
    count("gemm_afp4wfp4")
    assert config is None
    assert not skip_reduce
    assert dtype in (torch.bfloat16, torch.float16)
    assert x.shape[1] == w.shape[1]
    assert x.numel(), "a grid of no programs"
    for codes, scales in ((x, x_scales), (w, w_scales)):
        assert codes.dtype == scales.dtype == torch.uint8
        assert codes.stride(1) == 1
        assert scales.shape == (codes.shape[0], codes.shape[1] // 16)
    made = (numbers(x, x_scales) @ numbers(w, w_scales).t()).to(dtype)
    return made if y is None else y.copy_(made)


def e8m0_shuffle(scale: Tensor) -> Tensor:
    """Tiles of 32 rows and 8 columns, of scales [rows, columns]; padded to whole groups of 256 rows and 8 columns."""
    assert scale.ndim == 2, "scale must be a 2D tensor"
    rows, columns = scale.shape
    padded = torch.zeros(-(-rows // 256) * 256, -(-columns // 8) * 8, dtype=scale.dtype)
    padded[:rows, :columns] = scale
    parts = padded.view(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
    return parts.permute(0, 3, 5, 2, 4, 1).contiguous().view(padded.shape)


def scales_in_rows(tiles: Tensor) -> Tensor:
    """The inverse of ``e8m0_shuffle``, of whole tiles."""
    place = e8m0_shuffle(torch.arange(tiles.numel()).view(tiles.shape))
    assert place.shape == tiles.shape
    plain = torch.empty_like(tiles)
    plain.view(-1)[place.view(-1)] = tiles.reshape(-1)
    return plain


def rounded_up(x: Tensor) -> Tensor:
    """float32 x [T, K] as MXFP4 has it, by the least power of two that no element exceeds six times."""
    groups = x.view(x.shape[0], -1, 32)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True) / 6)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    scaled = (groups / scale).nan_to_num()
    nearest = (scaled.abs()[..., None] - _NUMBERS).abs().argmin(-1)
    return (_NUMBERS[nearest] * scaled.sign() * scale).view(x.shape)


def numbers(packed: Tensor, exponents: Tensor) -> Tensor:
    """[N, K] of bytes [N, K / 2], the first element in the low bits, and exponents [N, K / 32]."""
    codes = unpack_nibbles(packed).long()
    signed = torch.where(codes > 7, -1.0, 1.0) * _NUMBERS[codes & 7]
    return signed * exponents.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
