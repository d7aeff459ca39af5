"""Root-mean-square norm."""

from __future__ import annotations

import torch


def rms_norm_out(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, eps: float) -> None:
    """Write the norm of x [..., n] over its last axis, times weight [n], to ``out``; see the op's reference."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul((wide * scale).to(x.dtype), weight, out=out)
