"""A process's place among those that torchrun started, and how they find out which of them belong together.

torchrun starts all processes again where one fails (``--max-restarts``), on all its nodes. Its store lives on, and has
what former processes wrote.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from hardpoint.config import EngineConfig
from hardpoint.parallel.process_group import LOOPBACK, PrefixStore, Store, own_address
from hardpoint.parallel.topology import Coordinates
from hardpoint_plugin_api import EngineDeadError

_LOOK_SECONDS = 0.05
_kept: list[Store] = []
"""torch's stores of this process. Without torchrun's own store, that of rank 0 serves all the others."""
_NEWEST = "attempt"
"""The key of the attempt that rank 0 has begun last."""


@dataclass(frozen=True)
class Launch:
    """A process's place as torchrun tells it, by its documented environment variables."""

    place: Coordinates
    master: tuple[str, int]
    """The address and port of torchrun's store."""

    @classmethod
    def read(cls, config: EngineConfig) -> Self:
        """Raises ConfigError where torchrun did not start this process, or started another number of them."""
        place = config.topology.of_launched(os.environ)
        return cls(place, (os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", 0))))

    @property
    def own_host(self) -> str:
        """The address at which the launch's other processes reach this one."""
        return LOOPBACK if self.place.on_one_host else own_address(*self.master)

    def store(self, part: str) -> Store:
        """The part of the store that all processes share, such as one for each attempt; waits for rank 0's host."""
        from torch.distributed.rendezvous import rendezvous

        found: Store = next(rendezvous("env://", self.place.world_rank, self.place.topology.world))[0]
        _kept.append(found)
        return PrefixStore(f"hardpoint-{part}", found)

    def join_attempt(self, patience: float) -> str:
        """The name of the attempt to which this process belongs, once all of its processes have come here.

        Raises EngineDeadError for those that do not come within ``patience`` seconds.
        """
        store, until = self.store("attempts"), time.monotonic() + patience
        if self.place.world_rank == 0:
            return _gather(store, range(1, self.place.topology.world), patience)
        while time.monotonic() < until:
            if store.check([_NEWEST]) and _was_gathered(store, name := store.get(_NEWEST).decode(), self.place, until):
                return name
            time.sleep(_LOOK_SECONDS)
        raise built_no_engine([0], patience)


def _gather(store: Store, others: Iterable[int], patience: float) -> str:
    """Begin an attempt, as rank 0. Every process has shown that it is there, and is told whom rank 0 has seen."""
    name, until = secrets.token_hex(8), time.monotonic() + patience
    store.set(_NEWEST, name)
    keys = {rank: f"{name}/{rank}" for rank in others}
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        if time.monotonic() > until:
            raise built_no_engine(missing, patience)
        time.sleep(_LOOK_SECONDS)
    store.set(f"{name}/all", json.dumps({rank: store.get(key).decode() for rank, key in keys.items()}))
    return name


def _was_gathered(store: Store, name: str, place: Coordinates, until: float) -> bool:
    """Whether rank 0 of the attempt ``name`` has seen this process; False once it turns out to be a former attempt."""
    sign, everyone = secrets.token_hex(8), f"{name}/all"
    store.set(f"{name}/{place.world_rank}", sign)
    while time.monotonic() < until:
        if store.check([everyone]):
            seen: Mapping[str, str] = json.loads(store.get(everyone))
            return seen.get(str(place.world_rank)) == sign
        if store.get(_NEWEST).decode() != name:
            return False
        time.sleep(_LOOK_SECONDS)
    return False


def built_no_engine(ranks: Iterable[int], patience: float) -> EngineDeadError:
    """The error where these did not come."""
    return EngineDeadError(
        f"of torchrun's processes, ranks {list(ranks)} built no engine within {patience:g} seconds "
        "(--core-start-timeout); every process must run the same script"
    )
