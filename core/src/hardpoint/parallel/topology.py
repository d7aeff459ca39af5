"""The topology of an engine: how many ranks it has, how they are divided into groups, and each rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

GroupName = Literal["tp", "ep", "expert_tp"]
GROUPS: tuple[GroupName, ...] = get_args(GroupName)
"""Every group that a rank is in, in the order in which groups are joined."""


@dataclass(frozen=True)
class Topology:
    """``tensor`` ranks share every layer; ``expert`` groups of them share mixtures of experts by whole experts.

    Within one of the latter groups each expert is divided. ``expert`` divides ``tensor``.
    """

    tensor: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor

    def __str__(self) -> str:
        """The number of ranks by the flags that ask for it."""
        return f"--tensor-parallel-size {self.tensor}"

    def on_this_host(self, rank: int = 0) -> Coordinates:
        """The place of ``rank`` where all ranks are on one host, each on the device of its number."""
        return Coordinates(self, rank, rank, self.size)


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank: its number in the engine, and on its host, as ``local_rank`` of ``local_ranks``."""

    topology: Topology = Topology()
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1
    on_one_host: bool = True

    def members(self, group: GroupName) -> tuple[int, ...]:
        """The ranks of this rank's group of that name, ascending. Neighbours share the slices of the same experts."""
        slices = self.topology.tensor // self.topology.expert
        everyone = range(self.topology.tensor)
        if group == "ep":
            return tuple(rank for rank in everyone if rank % slices == self.rank % slices)
        if group == "expert_tp":
            return tuple(rank for rank in everyone if rank // slices == self.rank // slices)
        return tuple(everyone)
