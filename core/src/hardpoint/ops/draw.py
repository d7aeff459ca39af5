"""Fresh inputs for case generators: drawn on the host, so that a seed means the same numbers on every device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COMMON_WIDTHS = (1024, 4096, 5120, 8192)
"""Hidden sizes of common models (Llama 3, Qwen3): an op on hidden states has a case of few rows for each, since kernels
have tiles and tuning entries of their own for them."""


@dataclass(frozen=True)
class Draw:
    """Draws tensors of ``dtype`` on ``device`` from a host generator."""

    generator: torch.Generator
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of standard deviation ``scale``."""
        return self._place(torch.randn(shape, generator=self.generator) * scale)

    def between(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """Uniform numbers from ``low`` to ``high``."""
        return self._place(torch.rand(shape, generator=self.generator) * (high - low) + low)

    def strided(self, *shape: int) -> torch.Tensor:
        """Normal numbers in a view whose rows lie apart, as a slice of a merged projection's output does."""
        *leading, last = shape
        return self.normal(*leading, 2 * last + 3)[..., 3 : 3 + last]

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Int64 numbers from ``low`` to ``high``, ``high`` excluded."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def distinct(self, low: int, high: int, count: int) -> torch.Tensor:
        """``count`` different int64 numbers from ``low`` to ``high``, ``high`` excluded, in any order."""
        return (torch.randperm(high - low, generator=self.generator)[:count] + low).to(self.device)

    def floats(self, *shape: int) -> torch.Tensor:
        """Float32 numbers from 0 to 1, whatever the dtype under test."""
        return torch.rand(shape, generator=self.generator).to(self.device)

    def with_nan(self, *shape: int) -> torch.Tensor:
        """Normal numbers with a NaN in the first row."""
        x = self.normal(*shape)
        x.view(-1)[shape[-1] // 2] = float("nan")
        return x

    def with_non_finite(self, *shape: int) -> torch.Tensor:
        """Normal numbers with a NaN in the first row and an infinity in the last."""
        x = self.with_nan(*shape)
        x.view(-1)[-2] = float("inf")
        return x

    def _place(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.dtype)
