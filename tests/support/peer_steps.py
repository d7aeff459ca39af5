"""Tokens of all ranks in one step of an all-to-all, experts whose results are known, and how near results must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hardpoint_plugin_api import All2AllWorkload


@dataclass(frozen=True)
class Step:
    """The tokens of all ranks in one step: x [T, H], ids and weights [T, K] of each; scales [T, 1] where x is int8."""

    x: Sequence[torch.Tensor]
    ids: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor] | None
    is_expected: bool

    @property
    def rows(self) -> list[int]:
        """Tokens of each rank."""
        return [len(x) for x in self.x]


def draw(workload: All2AllWorkload, rows: Sequence[int], seed: int, *, quantized: bool, is_expected: bool) -> Step:
    """A step in which some tokens have fewer experts than others."""
    assert workload.hidden_size is not None
    assert workload.num_experts is not None
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, str(workload.dtype))
    x, ids, weights, scales = [], [], [], []
    for count in rows:
        drawn = torch.rand(count, workload.num_experts, generator=generator).argsort(-1)[:, : workload.top_k]
        ids.append(drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < 0.3, -1).int())
        weights.append(torch.rand(drawn.shape, generator=generator))
        one = torch.randn(count, workload.hidden_size, generator=generator)
        scales.append(torch.rand(count, 1, generator=generator) + 0.5)
        x.append((one * 40).clamp(-127, 127).to(torch.int8) if quantized else one.to(dtype))
    return Step(x, ids, weights, scales if quantized else None, is_expected)


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
    """The results of experts for tokens: number e, counted from ``first``, makes e + 1 times of one. float64."""
    factors = torch.where(ids >= 0, (ids + first + 1).double() * weights.double(), 0.0)
    return x.double() * factors.sum(-1, keepdim=True)


def by_own_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int, dtype: torch.dtype
) -> torch.Tensor:
    """The results of one rank's experts, number ``first`` and those behind it, for tokens that came to it; NaN for rows
    without any of them, which are of no use to anybody."""
    return experts(x, ids, weights, first).to(dtype).masked_fill((ids < 0).all(-1, keepdim=True), float("nan"))


def wrong_elements(found: torch.Tensor, step: Step, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Coordinates int64 [n, 2] of the elements of a rank's results ``found`` that are not what all experts make of its
    tokens, wherever they are: each rank's part may be off by a unit of ``dtype``."""
    x, ids, weights = step.x[rank].float(), step.ids[rank], step.weights[rank]
    x = x if step.scales is None else x * step.scales[rank]
    room = len(step.rows) * torch.finfo(dtype).eps * experts(x.abs(), ids, weights, 0)
    return ((found.double() - experts(x, ids, weights, 0)).abs() <= room).logical_not().nonzero()
