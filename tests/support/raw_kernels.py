"""Kernels that write through addresses, as C++ does, and kernels whose replays go wrong: the module of a test plugin.

It is installed as ``hp_raw.kernels``, and knows the plugin API alone. float32 on a CPU; NumPy computes.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
import torch

from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    BuildContext,
    CacheLayout,
    CaptureGrade,
    ExpertsCall,
    ExpertsKernel,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    PlainLayout,
    StoreCall,
)


def raw(x: torch.Tensor, address: int | None = None) -> Any:
    """A contiguous tensor's memory as an array, found by its address alone."""
    assert x.dtype == torch.float32, "these kernels know float32"
    memory = (ctypes.c_float * x.numel()).from_address(address or x.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(tuple(x.shape))


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@np.errstate(all="ignore")  # of those that are recorded by mistake: memory holds anything then
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Right, and nothing that a recorder of torch's operators could see."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        values = raw(x)
        raw(out)[...] = values / np.sqrt(np.square(values).mean(-1, keepdims=True) + eps) * raw(weight.contiguous())
    return out


def lying_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """The same, but it says that it is made of torch's operators."""
    return rms_norm(x, weight, eps=eps)


lying_norm.traceable = True  # type: ignore[attr-defined]  # a plugin's word, which is not true


def traced_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Right, of torch's operators."""
    return normed(x, weight, eps)


traced_norm.traceable = True  # type: ignore[attr-defined]  # a plugin's word


def baking_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Right when it is called; a recording keeps what the first elements of rows were when it was made."""
    x = x.contiguous()
    first = torch.tensor(raw(x).reshape(-1, x.shape[-1])[:, 0].tolist()).view(*x.shape[:-1], 1)
    return normed(torch.cat([first, x[..., 1:]], -1), weight, eps)


baking_norm.traceable = True  # type: ignore[attr-defined]  # a plugin's word, which is not true


def last_column_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Right when it is called; a replay has half of what belongs in the last column."""
    out = normed(x.contiguous(), weight, eps)
    out[..., -1].mul_(0.5)
    raw(out)[..., -1] *= 2
    return out


last_column_norm.traceable = True  # type: ignore[attr-defined]  # a plugin's word, which is not true


def many_rows_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Right for few rows; replays of more have half of what belongs in the last column."""
    return normed(x, weight, eps) if x.shape[0] < 3 else last_column_norm(x, weight, eps=eps)


many_rows_norm.traceable = True  # type: ignore[attr-defined]  # a plugin's word, which is not true


class RawLinear(LinearKernel):
    """Right; whatever it multiplies, no recorder sees it."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weight, bias = call.x.contiguous(), call.weights["weight"], call.bias
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        if out.numel():
            self.multiply(x, weight, out)
            if bias is not None:
                raw(out)[...] += raw(bias)
        return out

    @np.errstate(all="ignore")
    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        raw(out)[...] = raw(x) @ raw(weight).T


class LyingLinear(RawLinear):
    """The same, but it says that it is made of torch's operators."""

    traceable: ClassVar[bool] = True


class KeepingLinear(LinearKernel):
    """Right when it is called; a replay reads what its own memory, which it keeps from its first call, held last."""

    traceable: ClassVar[bool] = True

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self.kept: dict[tuple[int, ...], torch.Tensor] = {}

    def apply(self, call: LinearCall) -> torch.Tensor:
        x = call.x.contiguous()
        shape = tuple(x.shape)
        if shape not in self.kept:
            self.kept[shape] = x.clone()
        if x.numel():
            raw(self.kept[shape])[...] = raw(x)
        return torch.nn.functional.linear(self.kept[shape], call.weights["weight"], call.bias)


class LastColumnLinear(LinearKernel):
    """Right when it is called; a replay has half of what belongs in the last column."""

    traceable: ClassVar[bool] = True

    def apply(self, call: LinearCall) -> torch.Tensor:
        out = torch.nn.functional.linear(call.x, call.weights["weight"], call.bias)
        out[..., -1].mul_(0.5)
        raw(out)[..., -1] *= 2
        return out


class RawExperts(ExpertsKernel):
    """Right; gated by SiLU."""

    @np.errstate(all="ignore")
    def apply(self, call: ExpertsCall) -> None:
        values, made = raw(call.x), raw(call.out)
        w13, w2 = raw(call.w["w13.weight"]), raw(call.w["w2.weight"])
        made[...] = 0
        for token, (chosen, shares) in enumerate(zip(_ints(call.ids), raw(call.weights), strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                if 0 <= expert < len(w2):
                    gate, up = np.split(w13[expert] @ values[token], 2)
                    made[token] += share * (w2[expert] @ (gate / (1 + np.exp(-gate)) * up))


class LyingExperts(RawExperts):
    """The same, but it says that it is made of torch's operators."""

    traceable: ClassVar[bool] = True


class UncapturableExperts(RawExperts):
    """The same, and it says that it must not be recorded."""

    capturable = False


def _ints(x: torch.Tensor) -> Any:
    memory = (ctypes.c_int32 * x.numel()).from_address(x.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(tuple(x.shape))


class FrozenAttention(AttentionBackend):
    """Right when it is called; a recording reads no more tokens than the longest sequence of its first step has."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.SINGLE_TOKEN
    traceable: ClassVar[bool] = True

    def store(self, call: StoreCall) -> None:
        slots, block = call.slot_mapping.long(), self.spec.block_size
        for name, x in (("k", call.k), ("v", call.v)):
            call.cache[name].index_put_((slots // block, slots % block), x)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch)

    def forward(self, call: AttentionCall) -> None:
        batch, longest = call.metadata.batch, self.bound(call.metadata.batch)
        pages = batch.block_table[:, : -(-longest // self.spec.block_size)].long()
        keys, values = (call.cache[name][pages].flatten(1, 2)[:, :longest] for name in ("k", "v"))  # [N, S, K, D]
        is_written = torch.arange(keys.shape[1]) < batch.seq_lens[:, None]  # anything stands elsewhere, NaN too
        values = values.where(is_written[:, :, None, None], 0)
        request = torch.bucketize(torch.arange(len(call.q)), batch.query_start[1:].long(), right=True)
        behind = (batch.query_start[1:] - batch.seq_lens)[request]
        hidden = torch.arange(keys.shape[1]) > (torch.arange(len(call.q)) - behind)[:, None]  # [T, S]
        queries = call.q.unflatten(1, (self.spec.num_kv_heads, -1))
        scores = torch.einsum("tkgd,tskd->tkgs", queries, keys[request]) * self.spec.scale
        weights = torch.softmax(scores.masked_fill(hidden[:, None, None], float("-inf")), -1)
        call.out.copy_(torch.einsum("tkgs,tskd->tkgd", weights, values[request]).flatten(1, 2))

    def bound(self, batch: AttentionBatch) -> int:
        """How many tokens of each request are read."""
        return max(batch.seq_lens_host)


class FrozenPagesAttention(FrozenAttention):
    """The same, but by whole pages: the first page's tokens are always read."""

    def bound(self, batch: AttentionBatch) -> int:
        return -(-max(batch.seq_lens_host) // self.spec.block_size) * self.spec.block_size


class WidestAttention(FrozenAttention):
    """Right: it reads as many tokens as any sequence may have."""

    def bound(self, batch: AttentionBatch) -> int:
        return batch.block_table.shape[1] * self.spec.block_size
