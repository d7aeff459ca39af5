"""AITER's product of 4-bit floats, computed on the host; part of ``aiter_stand_in``.

Parameters, defaults and what it takes: aiter/ops/triton/gemm/basic/gemm_afp4wfp4.py at
01423766152c2cf08d7d7bdccae00a221f2da876 of github.com/ROCm/aiter. Strides that its kernel takes for granted are
checked, too.
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
    made = (_numbers(x, x_scales) @ _numbers(w, w_scales).t()).to(dtype)
    return made if y is None else y.copy_(made)


def _numbers(packed: Tensor, exponents: Tensor) -> Tensor:
    codes = unpack_nibbles(packed).long()
    signed = torch.where(codes > 7, -1.0, 1.0) * _NUMBERS[codes & 7]
    return signed * exponents.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
