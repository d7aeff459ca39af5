"""The control plane: what ranks tell each other before and beside steps, always from the CPU."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from hardpoint.parallel.process_group import PrefixStore, Store, process_group
from hardpoint.parallel.topology import Coordinates
from hardpoint_plugin_api import EngineError

T = TypeVar("T")


class RankLostError(EngineError):
    """This rank's work was lost because another rank failed: report that one's error."""


class ControlGroup:
    """All ranks that collectives connect, or those of one pipeline stage.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group`` has all ranks; without one this rank is alone."""
        self.rank, self.world = (group.rank(), group.size()) if group else (0, 1)
        self._group = group

    @classmethod
    def join(cls, store: Store, rank: int, world: int, timeout: float, *, on_one_host: bool) -> Self:
        """Meet the other ranks, wait for those that are late, at most ``timeout`` seconds."""
        own = PrefixStore("control", store)
        return cls(process_group("gloo", own, rank, world, timeout, on_one_host=on_one_host))

    def of_stage(self, place: Coordinates, store: Store, timeout: float) -> ControlGroup:
        """Join the group of the ranks of this rank's pipeline stage, see Coordinates: this group where that has all."""
        ranks = place.of_stage
        if len(ranks) == self.world:
            return self
        own = PrefixStore(f"stage/{ranks[0]}", store)
        return self.join(own, ranks.index(place.world_rank), len(ranks), timeout, on_one_host=place.on_one_host)

    def exchange(self, value: T) -> list[T]:
        """The value of every rank, in their order. Raises RankLostError where one is gone."""
        if self._group is None:
            return [value]
        try:
            return self._gathered(self._group, value)
        except RuntimeError as error:
            raise RankLostError(f"another rank is gone, or does not answer: {error}") from error

    def _gathered(self, group: dist.ProcessGroup, value: T) -> list[T]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.empty(self.world, dtype=torch.int64)
        group._allgather_base(sizes, torch.tensor([data.numel()])).wait()
        most = int(sizes.max())
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: data.numel()] = data
        gathered = torch.empty(self.world * most, dtype=torch.uint8)
        group._allgather_base(gathered, padded).wait()
        rows = zip(gathered.split(most), sizes.tolist(), strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in rows]

    def vote(self, error: Exception | None = None) -> None:
        """Go on where every rank is well. Raises ``error``, or RankLostError where other ranks have one."""
        votes = self.exchange(f"{type(error).__name__}: {error}" if error else None)
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(votes) if text]
        if failed:
            raise RankLostError("the engine cannot start, since another rank has failed: " + "; ".join(failed))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run work of each rank by itself; go on once all have, see ``vote``. No other call of this group inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.vote(error)

    def least(self, value: int) -> int:
        """The least of all ranks' values."""
        return min(self.exchange(value))

    def close(self) -> None:
        """Leave."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None
