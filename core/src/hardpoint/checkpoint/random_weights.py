"""Weights out of nothing: for measuring a model's shape where no checkpoint is at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hardpoint_plugin_api import TensorInfo

_SPREAD = 0.02
"""Standard deviation, as most models are initialised with (Radford et al. 2019, GPT-2)."""


@dataclass(frozen=True)
class RandomWeights:
    """Makes tensors on ``device``, of ``dtype``: norms' weights are ones, all else is normally distributed.

    A tensor follows from ``seed`` and its name alone, so that ranks which make unlike ones agree on those they share.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int

    def make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor that a checkpoint would hold under ``name``."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        own = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(own, "little"))
        drawn = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        return drawn.mul_(_SPREAD)


@dataclass(frozen=True)
class NoTensors:
    """The checkpoint that a quantization method gets for ``folder`` where weights are random: one without tensors."""

    folder: Path
    names: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The source's name in messages."""
        return f"random weights for {self.folder}"

    def info(self, name: str) -> TensorInfo:
        """Raises KeyError."""
        raise KeyError(name)

    def read(self, name: str) -> torch.Tensor:
        """Raises KeyError."""
        raise KeyError(name)
