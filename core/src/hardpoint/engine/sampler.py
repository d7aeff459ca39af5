"""Draws the next token of each slot from its logits, by per-slot parameters and counter-based random numbers.

A draw depends on the slot's seed and the token's position alone, never on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hardpoint.context import Context
from hardpoint.engine.step import SlotSampling
from hardpoint.ops.sampling import argmax_tokens, philox_uniform, sample_tokens


@dataclass(frozen=True)
class SamplingOps:
    """The sampler's ops, bound with the model's so that the selection table holds them."""

    argmax: Callable[[torch.Tensor], torch.Tensor]
    sample: Callable[..., torch.Tensor]
    uniform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @classmethod
    def bind(cls, ctx: Context) -> SamplingOps:
        """Select the implementations."""
        return cls(argmax_tokens.bind(ctx), sample_tokens.bind(ctx), philox_uniform.bind(ctx))


class Sampler:
    """Parameters live in device arrays by slot; a row is written when a request takes the slot."""

    def __init__(self, ops: SamplingOps, num_slots: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_slots, dtype=dtype, device=device)

        self._temperature, self._top_p, self._min_p = (column(torch.float32) for _ in range(3))
        self._top_k, self._seed = column(torch.int32), column(torch.int64)
        self._greedy = [True] * num_slots
        self._ops = ops

    def set_slot(self, slot: int, sampling: SlotSampling) -> None:
        """Write the parameters of the request that takes ``slot``."""
        self._greedy[slot] = sampling.temperature == 0
        if self._greedy[slot]:
            self._temperature[slot] = 0.0
            return
        self._temperature[slot], self._top_k[slot] = sampling.temperature, sampling.top_k
        self._top_p[slot], self._min_p[slot], self._seed[slot] = sampling.top_p, sampling.min_p, sampling.seed

    def sample(self, logits: torch.Tensor, slots: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """logits [N, V] of ``slots`` -> tokens int64 [N]; ``positions`` int64 [N] are those of the drawn tokens."""
        if all(self._greedy[slot] for slot in slots):
            return self._ops.argmax(logits)
        rows = torch.tensor(slots, device=logits.device)
        uniform = self._ops.uniform(self._seed[rows], positions)
        return self._ops.sample(
            logits, self._temperature[rows], self._top_k[rows], self._top_p[rows], self._min_p[rows], uniform
        )
