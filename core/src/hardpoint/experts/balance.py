"""The experts of one layer on its ranks: the routing map, the loads that it counts, and moves between ranks.

Axes: T tokens, K experts per token, E experts, R ranks with experts of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from hardpoint.context import Context
from hardpoint.experts.placement import Move, Placement
from hardpoint_plugin_api import ConfigError

_SHARED = "balanced experts"


@dataclass(frozen=True)
class Balanced:
    """A layer's experts before and after they were balanced.

    ``before`` and ``after`` are the busiest rank's load over the mean. ``num_moved`` experts went to another rank,
    ``nbytes`` in all.
    """

    path: str
    before: float
    after: float
    num_moved: int
    nbytes: int


class PlacedExperts:
    """Experts that stay where they are loaded."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def physical(self, ids: torch.Tensor) -> torch.Tensor:
        """The physical numbers int32 [T, K] of one copy of each of the experts ``ids`` int32 [T, K]; -1 stays."""
        return ids

    def check(self) -> None:
        """Raise ConfigError where the packed weights cannot be moved as the config asks."""

    def reset(self) -> None:
        """Be as at the start: the weights are about to be read again."""


class BalancedExperts(PlacedExperts):
    """Experts that ``balance`` moves. Device tensors keep their addresses, so that captured steps use the new map.

    ``weights`` returns the layer's packed weights: of each tensor, axis 0 is the slots of this rank.
    """

    def __init__(
        self, ctx: Context, placement: Placement, weights: Callable[[], Mapping[str, torch.Tensor]], *, partial: bool
    ) -> None:
        """``partial``: each rank counts the tokens of its own share."""
        super().__init__(placement)
        self._path, self._weights, self._is_partial = ctx.path, weights, partial
        self._first, self._ep, self._tp = placement, ctx.parallel.ep, ctx.parallel.tp
        device, num_experts = ctx.torch_device, placement.num_experts
        self._physical = torch.zeros(num_experts, self._ep.size, dtype=torch.int32, device=device)
        self._copies = torch.ones(num_experts, dtype=torch.int64, device=device)
        self._loads = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._write_map()
        balanced_experts(ctx).append(self)

    def physical(self, ids: torch.Tensor) -> torch.Tensor:
        """Count the tokens of each expert, and spread them over its copies by turns.

        Tokens that fill up a captured step count too, where they go to experts: they are work like others.
        """
        rows, is_sent = ids.long().clamp(min=0), ids >= 0
        self._loads.scatter_add_(0, rows.flatten(), is_sent.flatten().long())
        turn = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
        return torch.where(is_sent, self._physical[rows, turn % self._copies[rows]], -1)

    def check(self) -> None:
        list(self._parts())

    def reset(self) -> None:
        self._place(self._first)

    def forget_loads(self) -> None:
        """Count anew."""
        self._loads.zero_()

    def balance(self) -> Balanced:
        """Place the experts by their loads, move their weights, and count anew. Every rank of the stage must call
        it, on all replicas that share experts."""
        loads: list[float] = self._common_loads().tolist()
        before, target = self.placement, self.placement.balanced(loads)
        moves = before.moves_to(target)
        nbytes = self._move(moves)
        self._place(target)
        return Balanced(self._path, before.imbalance(loads), target.imbalance(loads), len(moves), nbytes)

    def _common_loads(self) -> torch.Tensor:
        """The loads of all ranks, float32 [E]: the same on each, since each computes the placement from them."""
        loads = self._loads.float()
        if self._is_partial:
            loads = self._ep.all_reduce(loads)
        everyone = self._ep if self._ep.size > self._tp.size else self._tp
        everyone.broadcast(loads, 0)
        return loads

    def _place(self, placement: Placement) -> None:
        self.placement = placement
        self.forget_loads()
        self._write_map()

    def _write_map(self) -> None:
        table = self.placement.physical
        rows = [numbers + [0] * (self._ep.size - len(numbers)) for numbers in table]
        self._physical.copy_(torch.tensor(rows, dtype=torch.int32))
        self._copies.copy_(torch.tensor([len(numbers) for numbers in table]))

    def _move(self, moves: list[Move]) -> int:
        """Send and receive; returns the bytes that went between ranks, for one slice of each expert.

        Received experts are written once all are sent, since an expert may leave the slot that another comes to.
        """
        parts = list(self._parts())
        received = []
        for move in moves:
            for part in parts:
                if move.source == self._ep.rank:
                    self._ep.send(_row(part, move.slot_from), move.target)
                elif move.target == self._ep.rank:
                    row = torch.empty_like(_row(part, move.slot))
                    self._ep.recv(row, move.source)
                    received.append((part, move.slot, row))
        for part, slot, row in received:
            part[slot].copy_(row.view(part.dtype).view(part[slot].shape))
        return len(moves) * sum(part[0].nbytes for part in parts)

    def _parts(self) -> Iterator[torch.Tensor]:
        for name, part in self._weights().items():
            if part.ndim == 0 or part.shape[0] != self.placement.num_slots:
                raise ConfigError(
                    f"--enable-eplb: layer {self._path!r}: experts cannot be moved, since the kernel packs {name} as "
                    f"{list(part.shape)}, without a first axis of {self.placement.num_slots} experts; choose another "
                    "kernel by --experts-backend"
                )
            yield part


def place_experts(
    ctx: Context, placement: Placement, weights: Callable[[], Mapping[str, torch.Tensor]], *, partial: bool
) -> PlacedExperts:
    """Experts that are loaded by ``placement``, and balanced where the config asks for it; see BalancedExperts."""
    if ctx.config.enable_eplb:
        return BalancedExperts(ctx, placement, weights, partial=partial)
    return PlacedExperts(placement)


def balanced_experts(ctx: Context) -> list[BalancedExperts]:
    """The model's layers of experts that are balanced among ranks (``--enable-eplb``), first layer first."""
    return ctx.shared(_SHARED, list[BalancedExperts])


def _row(part: torch.Tensor, slot: int) -> torch.Tensor:
    """One slot as bytes: collectives take few dtypes."""
    return part[slot : slot + 1].contiguous().view(-1).view(torch.uint8)
