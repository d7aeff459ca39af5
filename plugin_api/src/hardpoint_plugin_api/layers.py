"""Constructor arguments of core's pluggable layers, and the weight slots a layer declares.

They are dataclasses here, so that a plugin that replaces a layer needs nothing but this package to know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeArgs:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its context extensions.

    ``rotary_dim`` leading elements of a head are rotated, by angles tabulated for ``max_position`` positions.
    ``interleaved`` pairs (2i, 2i+1) instead of (i, i+d/2).
    ``scaling`` holds the numeric parameters of ``kind`` as they stand in a Hugging Face config.
    """

    rotary_dim: int
    theta: float
    max_position: int
    kind: RopeKind = "default"
    interleaved: bool = False
    scaling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class LinearArgs:
    """A linear layer. ``parts`` are the named row blocks of a merged one, in order: (("q", 512), ("k", 128), ...)."""

    in_features: int
    parts: tuple[tuple[str, int], ...]
    bias: bool = False

    @property
    def out_features(self) -> int:
        """Rows of the whole weight."""
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True)
class NormArgs:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    size: int
    eps: float


@dataclass(frozen=True)
class EmbeddingArgs:
    """A token embedding or the output head: ``vocab_size`` rows of ``hidden_size``."""

    vocab_size: int
    hidden_size: int


@dataclass(frozen=True)
class AttentionArgs:
    """Self-attention of a decoder: projections, optional per-head norm of q and k, rotary embedding, cache.

    ``window``, ``soft_cap``, ``sinks`` and ``alibi`` are as in AttentionSpec.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: RopeArgs | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False


@dataclass(frozen=True)
class MLPArgs:
    """A gated feed-forward: ``down(activation(gate(x)) * up(x))``; ungated where ``gated`` is False."""

    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class BlockArgs:
    """One pre-norm decoder block: (x, residual) -> (x, residual)."""

    attention: AttentionArgs
    mlp: MLPArgs
    norm: NormArgs


@dataclass(frozen=True)
class WeightSlot:
    """One tensor that a layer wants: shape and dtype (a torch dtype's name) on this rank, before any packing.

    ``parts`` are named blocks along axis 0, in order, which a checkpoint may hold as tensors of their own; empty means
    one unnamed part. ``shard_axis`` is the axis that tensor parallelism divides, or None for a replicated weight.
    """

    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None
    parts: tuple[tuple[str, int], ...] = ()

    def part_rows(self, part: str | None) -> tuple[int, int]:
        """Start and length along axis 0 of ``part`` (None: the whole)."""
        if part is None:
            return 0, self.shape[0]
        start = 0
        for name, rows in self.parts:
            if name == part:
                return start, rows
            start += rows
        raise KeyError(part)
