"""Operators that stand for those of vllm-xpu-kernels, on tensors of the host: torch itself checks the recorded schemas.

They compute in torch, and refuse what the real ones would. Checks: csrc/xpu/onednn/onednn_matmul.cpp at 1fd7c92,
fp8_gemm_w8a16.h at 26497a0, fp8_gemm_w8a8.h at dda91d1, int4_gemm_w4a16.h at 7671b1c,
csrc/xpu/grouped_gemm/xe_2/grouped_gemm_xe2_interface.hpp at dac47bc, csrc/moe/remap_hidden_states.cpp and
moe_gather.cpp at a96998c, csrc/layernorm.cpp at 0a292c3b and csrc/activation.cpp at 0fce58b6 of
github.com/vllm-project/vllm-xpu-kernels. Strides that kernels take for granted are checked, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hardpoint.numerics import unpack_nibbles
from hardpoint.ops import act_and_mul as gates
from hardpoint.ops import rms_norm as norms
from hardpoint_xpu.vllm_library import SCHEMAS

CALLS: dict[str, int] = {}
"""How often each function was called."""

_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_LIBRARIES: dict[str, torch.library.Library] = {}
"""Operators are there as long as these are."""


def count(name: str) -> None:
    """One call more."""
    CALLS[name] = CALLS.get(name, 0) + 1


def stands_for(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define the operator with the recorded schema of ``name``."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        module, _, own = name.partition(".")
        library = _LIBRARIES.setdefault(module, torch.library.Library(module, "FRAGMENT"))
        library.define(SCHEMAS[name])

        def counted(*arguments: Any) -> Any:
            count(own)
            return function(*arguments)

        library.impl(own, counted, "CPU")
        return function

    return define


@stands_for("_C.rms_norm")
def rms_norm(result: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Writes to ``result``."""
    assert result.is_contiguous()
    assert x.stride(-1) == 1
    assert 2 <= x.dim() <= 4, "rows of two to four dimensions only"
    assert x.numel(), "a grid of no groups"
    assert result.shape == x.shape
    assert result.dtype == x.dtype
    result.copy_(norms.rms_norm.reference(x, _checked(weight, x), eps=epsilon))


@stands_for("_C.fused_add_rms_norm")
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Writes the sum to ``residual`` and the norm to ``x``."""
    assert x.numel(), "a grid of no groups"
    assert residual.is_contiguous()
    assert residual.shape == x.shape
    assert residual.dtype == x.dtype
    residual.copy_(x + residual)
    x.copy_(norms.rms_norm.reference(residual, _checked(weight, x), eps=epsilon))


def _checked(weight: Tensor | None, x: Tensor) -> Tensor:
    """A norm's weight for rows ``x``."""
    assert weight is not None
    assert weight.is_contiguous()
    assert weight.dtype == x.dtype, "rms_norm: weight dtype must match input dtype"
    assert weight.shape == x.shape[-1:], "rms_norm: 1D weight size must match hidden_size"
    return weight


@stands_for("_C.silu_and_mul")
def silu_and_mul(result: Tensor, x: Tensor) -> None:
    """Writes to ``result``."""
    _gate(result, x, "silu")


@stands_for("_C.gelu_and_mul")
def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    """Writes to ``out``."""
    _gate(out, x, "gelu")


@stands_for("_C.gelu_tanh_and_mul")
def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    """Writes to ``out``."""
    _gate(out, x, "gelu_tanh")


def _gate(out: Tensor, x: Tensor, activation: str) -> None:
    assert x.is_contiguous(), "its kernels read by the address alone"
    assert out.is_contiguous()
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], x.shape[-1] // 2)
    out.copy_(gates.act_and_mul.reference(x, activation=activation))


@stands_for("_xpu_C.fp8_gemm_w8a16")
def fp8_gemm_w8a16(a: Tensor, b: Tensor, b_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """[M, K] x [K, N]."""
    assert a.dtype in _HALF, "Unsupported data type for fp8 matmul"
    assert b.dtype in _FP8, "weight must be f8_e5m2 or f8_e4m3fn for fp8 matmul"
    assert b_scale is not None
    return _product(a, _numbers(b, _weight_scales(b, b_scale, b_scale.dim() == 2 and b_scale.size(0) > 1)), bias)


@stands_for("_xpu_C.fp8_gemm")
def fp8_gemm(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """[M, K] x [K, N]; without ``dtype`` in float16."""
    assert a.dtype == b.dtype, "input and weight must be f8_e5m2 or f8_e4m3fn for fp8 matmul"
    assert a.dtype in _FP8
    assert dtype in _HALF, "output must be float16 or bfloat16 for fp8 matmul"
    assert a_scale is not None
    assert b_scale is not None
    assert a_scale.is_contiguous(), "A_scale must be contiguous for fp8 matmul"
    (m, k), blocks = a.shape, a_scale.dim() == 2 and a_scale.size(1) > 1
    if blocks:
        assert a_scale.size(1) == b_scale.size(0), "Mismatch group size in input and weight."
        scales = a_scale.repeat_interleave(k // a_scale.size(1), 1)
    else:
        assert a_scale.numel() in (1, m)
        scales = a_scale.reshape(-1, 1)
    return _product((a.float() * scales).to(dtype), _numbers(b, _weight_scales(b, b_scale, blocks)), bias)


@stands_for("_xpu_C.int4_gemm_w4a16")
def int4_gemm_w4a16(
    a: Tensor, b: Tensor, bias: Tensor | None, b_scale: Tensor, b_zp: Tensor, group_size: int, g_idx: Tensor | None
) -> Tensor:
    """[M, K] x [K / 8, N] words."""
    assert g_idx is None
    assert a.dtype in _HALF, "Unsupported data type for int4-f16/bf16 matmul"
    assert b.dtype == torch.int32
    assert b.stride(0) == 1, "Int4 weight must be in NT format!"
    assert b_scale.is_contiguous(), "B_scale must be contiguous for int4 matmul"
    k, n = a.shape[1], b.shape[1]
    assert b.shape[0] * 8 == k
    assert b_scale.shape == (k // group_size, n)
    codes = unpack_nibbles(b.t().contiguous().view(torch.uint8)).float()
    if b_zp.dim() == 1:
        assert (b_zp.dtype, b_zp.numel()) == (torch.int8, 1)
        zeros = b_zp.float().expand(n, k)
    else:
        assert b_zp.dtype == torch.int32
        assert b_zp.shape == (k // group_size, n // 8)
        assert b_zp.is_contiguous()
        zeros = unpack_nibbles(b_zp.view(torch.uint8)).t().float().repeat_interleave(group_size, 1)
    return _product(a, (codes - zeros) * b_scale.t().float().repeat_interleave(group_size, 1), bias)


@stands_for("_xpu_C.cutlass_grouped_gemm_interface")
def cutlass_grouped_gemm_interface(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor | None,
    bias: Tensor | None,
    d: Tensor,
    rows: Tensor,
    n: int,
    k: int,
    experts: int,
) -> Tensor:
    """Writes to ``d`` [P, N]: rows of ``a`` [P, K] in order of experts, times ``b`` [E, K, N]."""
    assert a_scale is None
    assert n % 8 == 0, "N must be divisible by 8"
    assert a.dtype in _HALF
    assert d.dtype == a.dtype
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert d.is_contiguous()
    assert b.shape == (experts, k, n), "ptr_A.size(1) must match ptr_B.size(1)"
    assert d.shape == (a.shape[0], n)
    assert a.shape[1] == k
    assert rows.dtype == torch.int32
    assert int(rows.sum()) == a.shape[0]
    if b.dtype in _FP8:
        assert b_scale is not None, "block-fp8 grouped gemm must have scales"
        assert b_scale.dtype == torch.float32
        assert b_scale.is_contiguous(), "ptr_scales must be contiguous"
        assert k % 128 == n % 128 == 0
        assert b_scale.shape == (experts, k // 128, n // 128), "block-fp8 scales must be [E, K/128, N/128]"
        numbers = b.float() * b_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    else:
        assert b.dtype == a.dtype
        assert b_scale is None
        numbers = b.float()
    if bias is not None:
        assert bias.shape == (experts, n), "ptr_bias.size(0) must match num_experts"
        assert bias.dtype == a.dtype
    first = 0
    for expert, size in enumerate(rows.tolist()):
        part = slice(first, first + size)
        d[part] = linear(a[part], numbers[expert].t().to(a.dtype), None if bias is None else bias[expert])
        first += size
    return d


@stands_for("_moe_C.remap_hidden_states")
def remap_hidden_states(
    x: Tensor,
    scales: Tensor | None,
    remapped: Tensor,
    remapped_scales: Tensor | None,
    expert_map: Tensor | None,
    rows: Tensor,
    places: Tensor,
    ids: Tensor,
    total: int,
    local: int,
) -> None:
    """Writes to ``remapped`` [P, H], ``places`` [T, K], and adds to ``rows`` [E]: pairs in order of experts."""
    assert scales is remapped_scales is expert_map is None
    assert x.dtype == remapped.dtype, "hidden_states and remapped_hidden_states must have save dtype"
    assert x.is_contiguous()
    assert remapped.is_contiguous()
    assert ids.is_contiguous()
    assert rows.dtype == places.dtype == torch.int32, "rows_per_expert must be int32"
    assert ids.dtype in (torch.int32, torch.int64), "topk_ids must be int64 or int32"
    assert ids.shape[1] in (1, 2, 4, 6, 7, 8, 10, 16), "Unsupported TopK value"
    assert remapped.shape == (ids.numel(), x.shape[1])
    assert rows.shape == (local,)
    assert not int(rows.sum()), "counts are added to what is there"
    assert local == total <= 1024
    assert x.shape[1] % (16 // x.element_size()) == 0
    assert int(ids.min()) >= 0, "an expert's number is an index"
    order = ids.flatten().long().argsort(stable=True)
    rows += torch.bincount(ids.flatten().long(), minlength=local).to(torch.int32)
    places.view(-1)[order] = torch.arange(ids.numel(), dtype=torch.int32)
    remapped.copy_(x[order // ids.shape[1]])


@stands_for("_moe_C.moe_gather")
def moe_gather(out: Tensor, results: Tensor, weights: Tensor, places: Tensor, experts: int) -> None:
    """Writes to ``out`` [T, H]."""
    assert weights.dtype == torch.float32, "topk_weights must be float32"
    assert out.dtype == results.dtype
    assert all(t.is_contiguous() for t in (out, results, weights, places))
    assert results.shape == (weights.numel(), out.shape[1])
    out.copy_((results[places.long()].float() * weights[..., None]).sum(1))


def _weight_scales(b: Tensor, scale: Tensor, blocks: bool) -> Tensor:
    """The scale of each element of ``b`` [K, N], as what broadcasts to [N, K]."""
    assert scale.is_contiguous(), "B_scale must be contiguous for fp8 matmul"
    assert scale.dtype == torch.float32
    k, n = b.shape
    if blocks:
        return scale.repeat_interleave(k // scale.size(0), 0).repeat_interleave(n // scale.size(1), 1).t()
    assert scale.numel() in (1, n)
    return scale.reshape(-1, 1)


def _numbers(b: Tensor, scales: Tensor) -> Tensor:
    assert 1 in b.stride()
    return b.t().float() * scales


def _product(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As core's ``emulated`` multiplies: of numbers in the dtype of ``a`` [M, K]."""
    assert a.is_contiguous()
    assert a.shape[0], "a matrix without rows"
    assert bias is None or bias.dtype == a.dtype
    return linear(a, weight.to(a.dtype), bias)
