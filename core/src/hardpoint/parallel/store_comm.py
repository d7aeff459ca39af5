"""The calls of MPI that libraries of exchanges need at their start, served by the store of a group."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class StoreComm:
    """The methods of an mpi4py communicator by which libraries pass handles. All ranks make the same calls.

    Objects are pickled: the store is the ranks' alone.
    """

    def __init__(self, store: Store, rank: int, world: int, seconds: float) -> None:
        """A call waits ``seconds`` for the other ranks."""
        self._store, self._rank, self._world = store, rank, world
        self._timeout, self._calls = timedelta(seconds=seconds), 0

    def Get_rank(self) -> int:  # noqa: N802  # MPI's name
        """This rank."""
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        """The number of ranks."""
        return self._world

    def Split(self, color: int, key: int) -> StoreComm:  # noqa: N802
        """The group itself: all of its ranks stay together."""
        return self

    def allgather(self, data: object) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks."""
        self._calls += 1
        keys = [f"allgather/{self._calls}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], pickle.dumps(data).hex())
        self._store.wait(keys, self._timeout)
        return [pickle.loads(bytes.fromhex(self._store.get(key).decode())) for key in keys]

    def bcast(self, data: object, root: int) -> Any:
        """Return the value of rank ``root``."""
        return self.allgather(data)[root]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.allgather(None)
