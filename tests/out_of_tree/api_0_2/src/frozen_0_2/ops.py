"""The three forms of an op, and all that a factory is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import silu

from hardpoint_plugin_api import BuildContext, OpWorkload


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Functional."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rms_norm_out(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, eps: float) -> None:
    """Into an output of the caller's."""
    out.copy_(rms_norm(x, weight, eps=eps))


def make_act_and_mul(
    ctx: BuildContext, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., torch.Tensor]:
    """By a factory, which uses everything that a build context has."""
    assert isinstance(ctx, BuildContext)
    assert ctx.plugin_config("frozen_0_2") == {"count": 3, "share": 0.5, "loud": False, "label": "frozen"}
    assert workload.dtype == str(ctx.dtype).removeprefix("torch.")
    assert ctx.device.torch_type == ctx.torch_device.type
    assert ctx.child("deeper").path.endswith("deeper")
    ctx.resources.declare("frozen scratch", 64, align=64, scope="engine")
    calls = ctx.metrics.counter("calls", "Calls of the op.")
    rows = ctx.metrics.gauge("rows", "Rows of the last call.")
    seconds = ctx.metrics.histogram("seconds", "How long it took.")

    def act_and_mul(x: torch.Tensor, *, activation: str) -> torch.Tensor:
        assert activation == "silu"
        assert ctx.resources.get("frozen scratch").numel() == 64
        calls.inc()
        rows.set(x.shape[0])
        with ctx.range("act_and_mul"), seconds.time():
            gate, up = x.chunk(2, dim=-1)
            return silu(gate) * up

    return act_and_mul
