"""The topology of an engine: how many ranks it has, how they are divided into groups, and each rank's place in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from hardpoint_plugin_api import ConfigError

LAUNCHER = os.getppid()
"""The process that started this one: torchrun's, under torchrun. Read while it lives: an orphan has another parent."""

GroupName = Literal["tp", "ep", "expert_tp", "pp"]
GROUPS: tuple[GroupName, ...] = get_args(GroupName)
"""Every group that a rank is in, in the order in which groups are joined."""


@dataclass(frozen=True)
class Topology:
    """The sizes. ``pipeline`` stages share the blocks of a model, and ``tensor`` ranks every layer of a stage.

    ``expert`` groups of the latter share mixtures of experts by whole experts; within one of these groups each expert
    is divided. ``expert`` divides ``tensor``. The ranks of a stage have consecutive numbers.

    ``data`` replicas have so many ranks each, and this is the topology of the one of number ``replica``. Nothing but
    their places on the host connects the ranks of two replicas, unless ``expert`` is ``data`` x ``tensor``: then the
    ranks of all replicas share the experts of a stage, and are numbered through. ``here``: the replicas of this server;
    None: all of them.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1
    replica: int = 0
    here: range | None = None

    @property
    def size(self) -> int:
        """The number of ranks of a replica."""
        return self.pipeline * self.tensor

    @property
    def local_size(self) -> int:
        """The number of ranks of all replicas of this server."""
        return self.size * (self.data if self.here is None else len(self.here))

    @property
    def shares_experts(self) -> bool:
        """Whether replicas share experts, so that they run every step together."""
        return self.expert > self.tensor

    @property
    def world(self) -> int:
        """The number of ranks that collectives connect: of a replica, or of all that share experts."""
        return self.data * self.size if self.shares_experts else self.size

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of ``rank``, one of the world's."""
        return rank % self.size // self.tensor

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each stage. That of the first stage leads; that of the last answers."""
        return tuple(range(0, self.size, self.tensor))

    def __str__(self) -> str:
        """The number of ranks by the flags that ask for it."""
        asked = (("data", self.data), ("pipeline", self.pipeline), ("tensor", self.tensor))
        sizes = [f"--{axis}-parallel-size {size}" for axis, size in asked if size > 1]
        if len(sizes) > 1:
            return f"{' x '.join(sizes)} = {self.data * self.size} ranks"
        return sizes[0] if sizes else "--tensor-parallel-size 1"

    def of_launched(self, environment: Mapping[str, str]) -> Coordinates:
        """The place of a process that torchrun started, by the variables that it sets. Replicas that share experts
        have successive processes.

        Raises ConfigError where it did not start the process, or started another number of them.
        """
        started = (
            "--executor torchrun: torchrun did not start this process ({}); run torchrun --nproc-per-node "
            f"{self.world} SCRIPT, or use --executor mp"
        )
        numbers: dict[str, int] = {}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
            text = environment.get(name)
            if text is None:
                raise ConfigError(started.format(f"{name!r} is not in its environment"))
            if name != "MASTER_ADDR":
                if not (text.isascii() and text.isdigit()):
                    raise ConfigError(started.format(f"{name} must be a whole number, got {text!r:.80}"))
                numbers[name] = int(text)
        rank, local_rank, world, local_world, _ = numbers.values()
        if world != self.world:
            raise ConfigError(
                f"{self}: torchrun started {world} processes; one is needed for each rank: start {self.world} in all "
                "(--nproc-per-node, --nnodes), or change the sizes"
            )
        if rank >= world or local_rank >= local_world:
            raise ConfigError(started.format(f"RANK is {rank} of {world}, LOCAL_RANK {local_rank} of {local_world}"))
        replica, own = divmod(rank, self.size)
        topology = replace(self, replica=replica) if self.shares_experts else self
        return Coordinates(topology, own, local_rank, local_world, world == local_world)

    def on_this_host(self, rank: int = 0) -> Coordinates:
        """The place of ``rank`` where all ranks of this server are on one host, each on the device of its number
        there."""
        first = 0 if self.here is None else self.here.start
        local_rank = (self.replica - first) * self.size + rank
        return Coordinates(self, rank, local_rank, self.local_size, on_one_host=self.here is None)


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank: its number in the replica, and on its host, as ``local_rank`` of ``local_ranks``."""

    topology: Topology = Topology()
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1
    on_one_host: bool = True

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.topology.stage_of(self.rank)

    @property
    def world_rank(self) -> int:
        """Its number among all ranks that collectives connect."""
        return self._first + self.rank

    @property
    def _first(self) -> int:
        """The replica's first rank in the world."""
        return self.topology.replica * self.topology.size if self.topology.shares_experts else 0

    @property
    def answers(self) -> bool:
        """Whether this rank answers for the replica: the first of the last stage."""
        return self.rank == self.topology.first_ranks[-1]

    @property
    def of_stage(self) -> tuple[int, ...]:
        """The ranks of this rank's stage, on all replicas that collectives connect, by their numbers in the world."""
        return tuple(rank for rank in range(self.topology.world) if self.topology.stage_of(rank) == self.stage)

    def members(self, group: GroupName) -> tuple[int, ...]:
        """The ranks of this rank's group of that name, by their numbers in the world, ascending.

        Neighbours share the slices of the same experts.
        """
        topology, own = self.topology, range(self._first, self._first + self.topology.size)
        if group == "pp":
            return tuple(own[self.rank % topology.tensor :: topology.tensor])
        if group == "tp":
            return tuple(rank for rank in own if topology.stage_of(rank) == self.stage)
        sharing = self.of_stage
        slices, rank = len(sharing) // topology.expert, self.world_rank
        if group == "ep":
            return tuple(other for other in sharing if other % slices == rank % slices)
        return tuple(other for other in sharing if other // slices == rank // slices)
