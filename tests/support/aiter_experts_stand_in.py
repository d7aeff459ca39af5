"""AITER's experts as far as they are called: one expert after the other, refusing what the real function would.

Parameters and defaults: aiter/fused_moe.py at d78f4797ba4e16927d83f5ede412767dd5430f5a and aiter/ops/shuffle.py at
b0b6945e7aff0b0c0860d225501440c81df1f361 of github.com/ROCm/aiter, as are the checks. Arguments with
``QuantType.per_1x32``: the same file at 000621842c1714b1e9162fc363003dc5936abf41.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.aiter_calls import count
from tests.support.aiter_mxfp4_stand_in import numbers, rounded_up, scales_in_rows

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class ActivationType(enum.IntEnum):
    """As in csrc/include/aiter_enum.h."""

    No = -1
    Silu = 0
    Gelu = 1


class QuantType(enum.IntEnum):
    """As in csrc/include/aiter_enum.h."""

    No = 0
    per_Tensor = 1  # noqa: N815
    per_Token = 2  # noqa: N815
    per_1x32 = 3


def shuffle_weight(
    x: Tensor,
    layout: tuple[int, int] = (16, 16),
    use_int4: bool = False,
    is_guinterleave: bool = False,
    gate_up: bool = False,
    pad_k_to: int = 0,
) -> Tensor:
    """Tiles of 16 rows and 32 columns, in parts of 16 bytes: a new tensor of the shape of ``x``."""
    (rows, half), part = layout, 16 // x.element_size()
    assert x.shape[-2] % rows == 0
    assert x.shape[-1] % (2 * half) == 0
    tiles = x.view(-1, x.shape[-2] // rows, rows, x.shape[-1] // (2 * half), 2 * half // part, part)
    return tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(x.shape)


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_size_M: int | None = None,  # noqa: N803  # the real names
    num_local_tokens: Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str | None = "separated",
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_w1_scale: Tensor | None = None,
    shared_w2_scale: Tensor | None = None,
    shared_expert_id: int = -1,
    stage2_scatter: object = None,
) -> Tensor:
    """A new tensor [T, H]."""
    count("fused_moe")
    assert dtype in (torch.float16, torch.bfloat16), f"Fused_moe unsupported out dtype: {dtype}"
    assert hidden_states.dtype == dtype
    assert hidden_states.is_contiguous()
    assert topk_weight.dtype == torch.float32
    assert topk_ids.dtype == torch.int32
    assert getattr(w1, "is_shuffled", False)
    assert getattr(w2, "is_shuffled", False)
    if quant_type is QuantType.per_1x32:
        return _of_mxfp4(hidden_states, w1, w2, topk_weight, topk_ids, activation, w1_scale, w2_scale)
    (experts, double, hidden), width = w1.shape, w2.shape[2]
    assert double == 2 * width, "Invalid MoE weight"
    assert w2.shape == (experts, hidden, width)
    assert 0 <= int(topk_ids.min()) <= int(topk_ids.max()) < experts, "an expert's number is an index"
    rounds = quant_type is QuantType.per_Token
    assert (w1.dtype in _FP8) == rounds
    scales: list[Tensor | None] = [w1_scale, w2_scale]
    for scale, rows in zip(scales, (double, hidden), strict=True):
        assert (scale is not None) == rounds
        assert scale is None or (scale.shape == (experts, rows, 1) and scale.dtype == torch.float32)
    act = functional.silu if activation is ActivationType.Silu else functional.gelu
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(experts):
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        first, second = (
            (_rows(w)[expert].float() * (1 if s is None else s[expert])).to(dtype)
            for w, s in zip((w1, w2), scales, strict=True)
        )
        x = _rounded(hidden_states[tokens], w1.dtype) if rounds else hidden_states[tokens]
        gate, up = functional.linear(x, first).chunk(2, dim=-1)
        middle = act(gate) * up
        y = functional.linear(_rounded(middle, w1.dtype) if rounds else middle, second)
        out.index_add_(0, tokens, y.float() * topk_weight[tokens, places, None])
    return out.to(dtype)


def _of_mxfp4(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: ActivationType,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
) -> Tensor:
    """Two elements a byte; scales in tiles, one for 32 columns."""
    (experts, double, bytes_), width = w1.shape, 2 * w2.shape[2]
    assert w1.dtype == w2.dtype == torch.float4_e2m1fn_x2
    assert double == 2 * width, "Invalid MoE weight"
    assert w2.shape == (experts, 2 * bytes_, width // 2)
    assert 0 <= int(ids.min()) <= int(ids.max()) < experts, "an expert's number is an index"
    dense = []
    for w, scale in ((w1, w1_scale), (w2, w2_scale)):
        assert scale is not None
        assert scale.dtype == torch.uint8
        assert scale.shape == (*w.shape[:2], w.shape[2] // 16)
        exponents = scales_in_rows(scale.flatten(0, 1))
        dense.append(numbers(_rows(w.view(torch.uint8)).flatten(0, 1), exponents).view(*w.shape[:2], -1))
    act = functional.silu if activation is ActivationType.Silu else functional.gelu
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(rounded_up(x[tokens].float()), dense[0][expert]).chunk(2, dim=-1)
        middle = (act(gate) * up).to(x.dtype)
        y = functional.linear(rounded_up(middle.float()), dense[1][expert])
        out.index_add_(0, tokens, y * weights[tokens, places, None])
    return out.to(x.dtype)


def _rows(tiles: Tensor) -> Tensor:
    part = 16 // tiles.element_size()
    _, rows, columns = tiles.shape
    parts = tiles.view(-1, rows // 16, columns // 32, 32 // part, 16, part)
    return parts.permute(0, 1, 4, 2, 3, 5).reshape(tiles.shape)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = (x.float().abs().amax(-1, keepdim=True) / torch.finfo(dtype).max).clamp(min=1e-30)
    return ((x.float() / scale).to(dtype).float() * scale).to(x.dtype)
