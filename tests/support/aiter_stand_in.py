"""A module that stands for AITER: it computes by core's references, and refuses what the real one would.

Parameters and defaults: aiter/ops/rmsnorm.py at 0bc300f740e8ac412deb6bc68c23f7a9e582413c, aiter/ops/gemm_op_a8w8.py at
0006ebde8a078bb8bef51dd28db28dc2822f9c62, of github.com/ROCm/aiter. Checks: the same files, and
csrc/ck_gemm_a8w8/gemm_a8w8.cu at 1071d9b89c5a5382dd3e48872ffe08ea04045424,
csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale.cu at 0cf6df2c18002b7cb6dbac7205085099a07dd730. Strides that their
kernels take for granted are checked, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from hardpoint.ops import add_rms_norm as added
from hardpoint.ops import rms_norm as op
from tests.support.aiter_allreduce_stand_in import (
    init_custom_qr,
    qr_all_reduce,
    qr_destroy,
    qr_get_handle,
    qr_open_handles,
)
from tests.support.aiter_attention_stand_in import (
    flash_attn_varlen_func,
    mha_batch_prefill_func,
    pa_fwd_asm,
    paged_attention_v1,
)
from tests.support.aiter_calls import count
from tests.support.aiter_experts_stand_in import ActivationType, QuantType
from tests.support.aiter_triton_stand_in import top_k_per_row_prefill

__all__ = [
    "ActivationType",
    "QuantType",
    "flash_attn_varlen_func",
    "gemm_a8w8",
    "gemm_a8w8_blockscale",
    "init_custom_qr",
    "mha_batch_prefill_func",
    "pa_fwd_asm",
    "paged_attention_v1",
    "qr_all_reduce",
    "qr_destroy",
    "qr_get_handle",
    "qr_open_handles",
    "rms_norm",
    "rmsnorm2d_fwd_with_add",
    "top_k_per_row_prefill",
]


def rms_norm(input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0) -> Tensor:
    """A new tensor [T, n]."""
    count("rms_norm")
    _check_norm(input, weight)
    normed: Tensor = op.rms_norm.reference(input, weight, eps=epsilon)
    return normed


def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    gemma_norm: bool = False,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    """Writes to ``out`` and ``residual_out``."""
    count("rmsnorm2d_fwd_with_add")
    _check_norm(input, weight)
    assert out.dtype == input.dtype
    assert out.is_contiguous()
    for residual in (residual_in, residual_out):
        assert residual.dtype == input.dtype
        assert residual.is_contiguous()
        assert residual.shape == input.shape
    normed, total = added.add_rms_norm.reference(input, residual_in, weight, eps=epsilon)
    residual_out.copy_(total)
    out.copy_(normed)


def gemm_a8w8(
    XQ: Tensor,  # noqa: N803  # the real name, which callers pass
    WQ: Tensor,  # noqa: N803
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,  # noqa: N803
) -> Tensor:
    """A new tensor [M, N]."""
    count("gemm_a8w8")
    if XQ.dtype != WQ.dtype or XQ.dtype not in (torch.int8, torch.float8_e4m3fnuz):
        raise RuntimeError("Weights and activations should both be int8 or fp8!")
    if bias is not None and bias.dtype != dtype:
        raise RuntimeError("Out amd bias should have the same dtype!")
    _check_product(XQ, WQ, x_scale, w_scale, dtype)
    (m, k), n = XQ.shape, WQ.shape[0]
    assert (x_scale.numel(), w_scale.numel()) == (m, n)
    assert not k % 16
    return _product(XQ, WQ, x_scale.view(m, 1), w_scale.view(n, 1), dtype, bias)


def gemm_a8w8_blockscale(
    XQ: Tensor,  # noqa: N803
    WQ: Tensor,  # noqa: N803
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    isBpreshuffled: bool = False,  # noqa: N803
) -> Tensor:
    """A new tensor [M, N]."""
    count("gemm_a8w8_blockscale")
    assert dtype in (torch.bfloat16, torch.float16), f"Output {dtype=} is currently not supported in gemm_a8w8"
    assert not isBpreshuffled, "asm kernel only support B preshuffle and m >= 16"
    if XQ.dtype != WQ.dtype:
        raise RuntimeError("Weights and activations should have the same dtype!")
    _check_product(XQ, WQ, x_scale, w_scale, dtype)
    (m, k), n = XQ.shape, WQ.shape[0]
    assert x_scale.shape == (m, k // 128)
    assert w_scale.shape == (n // 128, k // 128)
    scales = w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return _product(XQ, WQ, x_scale.repeat_interleave(128, 1), scales, dtype)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    assert x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    assert weight.dtype == x.dtype, "rms_norm_opus: weight dtype must match input"
    assert x.stride(-1) == 1, "rms_norm_opus: last dim must be contiguous"
    assert weight.is_contiguous()
    assert weight.shape[-1] == x.shape[-1]
    assert x.numel(), "a grid of no programs"


def _check_product(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> None:
    if x_scale.dtype != w_scale.dtype:
        raise RuntimeError("Scales should have the same dtype!")
    if x_scale.dtype != torch.float32 or dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("Unsupported scales/output dtype!")
    assert x.numel(), "a grid of no programs"
    assert all(t.is_contiguous() for t in (x, w, x_scale, w_scale))


def _product(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """As core's ``emulated`` multiplies: of numbers in ``dtype``."""
    return linear((x.float() * x_scale).to(dtype), (w.float() * w_scale).to(dtype), bias)
