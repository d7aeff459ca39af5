"""Experts over pairs of a token and an expert: what kernels share that bring them together by expert (pair_lists.py).

Axes: T tokens, K experts of a token, P pairs, E experts, M rows per expert, H hidden, I width of an expert.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
import triton

from hardpoint.experts.middle import is_gated
from hardpoint.kernels.grouped_matmul import sum_of_results
from hardpoint.kernels.launch import begun
from hardpoint.kernels.pair_lists import PairLists
from hardpoint_plugin_api import (
    BatchedExpertsCall,
    BatchedExpertsKernel,
    BuildContext,
    DeviceInfo,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    Reason,
)

T = TypeVar("T")
_ALIGNMENT = 256


@dataclass(frozen=True)
class Pairs:
    """The arrays of both matmuls.

    ``x`` [P / K, H]: the rows; row ``p // K`` is that of pair p. ``ids`` int32 [P / K, K]: their experts, -1 for none.
    ``middle`` [P, I] and ``results`` [P, H] are written, of pairs with an expert. ``lists`` uint8 is scratch memory.
    """

    x: torch.Tensor
    ids: torch.Tensor
    w: dict[str, torch.Tensor]
    middle: torch.Tensor
    results: torch.Tensor
    lists: torch.Tensor


class PairedExperts(ExpertsKernel, Generic[T]):
    """Two matmuls over pairs in tiles of the kind T, then the weighted sum of each token's results."""

    most_rows: ClassVar[int]
    """Of a tile."""

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.num_experts is not None
        assert workload.top_k is not None
        assert workload.activation is not None
        assert workload.hidden_size is not None
        assert workload.intermediate_size is not None
        self._experts, self._top_k = workload.num_experts, workload.top_k
        self._hidden, self._width = workload.hidden_size, workload.intermediate_size
        self._activation, self._gated = workload.activation.removesuffix("_and_mul"), is_gated(workload.activation)
        self._lists = PairLists(self._experts)

    @abstractmethod
    def tiling(self, pairs: int) -> T:
        """The tiles for a step of so many pairs."""

    @abstractmethod
    def multiply(self, tiling: T, pairs: Pairs) -> None:
        """Both matmuls, and the activation between them, of at least one pair."""

    def sizes(self, pairs: int) -> tuple[int, int, int]:
        """Bytes of the first matmul's results, of the second's, and of lists (at their longest), each a multiple of
        256."""
        itemsize = self.ctx.dtype.itemsize
        sizes = (
            pairs * self._width * itemsize,
            pairs * self._hidden * itemsize,
            self._lists.nbytes(pairs, self.most_rows),
        )
        first, second, lists = (math.ceil(size / _ALIGNMENT) * _ALIGNMENT for size in sizes)
        return first, second, lists

    def workspace_bytes(self, rows: int) -> int:
        return sum(self.sizes(rows * self._top_k))

    def apply(self, call: ExpertsCall) -> None:
        if pairs := call.ids.numel():
            self.run(self.tiling(pairs), call)

    def run(self, tiling: T, call: ExpertsCall) -> None:
        """``apply`` in the given tiles, of at least one token."""
        x, ids = call.x, call.ids
        (tokens, top_k), pairs, sizes = ids.shape, ids.numel(), self.sizes(ids.numel())
        first, second, lists = call.workspace[: sum(sizes)].split_with_sizes(sizes)
        middle, results = self.middle(first, pairs), second.view(x.dtype)[: pairs * self._hidden].view(pairs, -1)
        self.multiply(tiling, Pairs(x, ids, call.w, middle, results, lists))
        block = min(triton.next_power_of_2(self._hidden), 1024 if tokens >= 64 else 256)
        sum_of_results[tokens, triton.cdiv(self._hidden, block)](
            results, ids, call.weights, call.out, self._hidden, top_k, block, num_warps=4, **begun(x)
        )

    def middle(self, scratch: torch.Tensor, pairs: int) -> torch.Tensor:
        """The first matmul's results [P, I], in the first bytes of ``scratch``."""
        return scratch.view(self.ctx.dtype)[: pairs * self._width].view(pairs, self._width)


class BatchedPairs(BatchedExpertsKernel):
    """A kernel of pairs over batches: each row that is a token makes one, and its result is stored in its place.

    Rows behind a batch's tokens cost no product. Tiles are for as many pairs as M tokens make on average.
    """

    kind: ClassVar[type[PairedExperts[Any]]]

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.top_k is not None
        self._kernel = self.kind(ctx, replace(workload, format="standard", top_k=1))
        self._top_k, self._ranks = workload.top_k, ctx.parallel.ep.size

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        return cls.kind.supports(workload, device)

    def workspace_bytes(self, rows: int) -> int:
        """For the first matmul's results, and the list of pairs."""
        first, _, lists = self._kernel.sizes(rows)
        return first + lists

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._kernel.prepack(weights)

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._kernel.unpack(weights)

    def apply(self, call: BatchedExpertsCall) -> None:
        experts, rows, hidden = call.x.shape
        if not (pairs := experts * rows):
            return
        first, _, lists = self._kernel.sizes(pairs)
        scratch, listed = call.workspace[: first + lists].split_with_sizes((first, lists))
        # By torch's operators, which are run also while kernels are compiled ahead: ids are never out of bounds.
        is_token = torch.arange(rows, device=call.x.device) < call.counts[:, None]
        numbers = torch.arange(experts, dtype=torch.int32, device=call.x.device)
        ids = torch.where(is_token, numbers[:, None], -1).view(pairs, 1)
        tokens = max(1, min(pairs, rows * self._top_k // self._ranks))
        middle, results = self._kernel.middle(scratch, pairs), call.out.view(pairs, hidden)
        self._kernel.multiply(
            self._kernel.tiling(tokens),
            Pairs(call.x.view(pairs, hidden), ids, call.w, middle, results, listed),
        )
