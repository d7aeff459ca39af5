"""Acme's norm, in the form that writes into an output of the caller's."""

from __future__ import annotations

import torch


def rms_norm_out(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, eps: float) -> None:
    """x [..., n], weight [n] -> out [..., n]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    torch.mul((wide * scale).to(x.dtype), weight, out=out)
