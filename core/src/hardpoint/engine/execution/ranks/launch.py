"""A process's place among those that torchrun started, and how they find out which of them belong together.

torchrun starts all processes again where one fails (``--max-restarts``), on all its nodes. Its store lives on, and has
what former processes wrote.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from hardpoint.config import EngineConfig
from hardpoint.parallel.process_group import LOOPBACK, PrefixStore, Store, own_address
from hardpoint.parallel.topology import LAUNCHER, Coordinates
from hardpoint_plugin_api import EngineDeadError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_ORPHAN_SECONDS = 5.0
"""For a rank to end by itself, and tell rank 0, once its launcher is gone."""
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
    patience: float = 600.0
    """How many seconds the store is waited for."""

    @classmethod
    def read(cls, config: EngineConfig) -> Self:
        """Raises ConfigError where torchrun did not start this process, or started another number of them."""
        place = config.topology.of_launched(os.environ)
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return cls(place, master, float(config.core_start_timeout))

    @property
    def own_host(self) -> str:
        """The address at which the launch's other processes reach this one."""
        return LOOPBACK if self.place.on_one_host else own_address(*self.master)

    def store(self, part: str) -> Store:
        """The part of the store that all processes share, such as one for each attempt; waits for rank 0's host.

        Raises EngineDeadError where that does not come, or its launcher is gone.
        """
        from torch.distributed.rendezvous import rendezvous

        rank, world = self.place.world_rank, self.place.topology.world
        with self._explained():
            found: Store = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=self.patience)))[0]
        _kept.append(found)
        return PrefixStore(f"hardpoint-{part}", found)

    def join_attempt(self, patience: float) -> str:
        """The name of the attempt to which this process belongs, once all of its processes have come here.

        Raises EngineDeadError for those that do not come within ``patience`` seconds, and where the store is gone.
        """
        with self._explained():
            return self._join_attempt(self.store("attempts"), patience)

    def _join_attempt(self, store: Store, patience: float) -> str:
        until = time.monotonic() + patience
        if self.place.world_rank == 0:
            return _gather(store, range(1, self.place.topology.world), patience)
        while time.monotonic() < until:
            if store.check([_NEWEST]) and _was_gathered(store, name := store.get(_NEWEST).decode(), self.place, until):
                return name
            time.sleep(_LOOK_SECONDS)
        raise built_no_engine([0], patience)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise EngineDeadError where the store cannot be reached."""
        try:
            yield
        except dist.DistError as error:
            host, port = self.master
            raise EngineDeadError(
                f"torchrun's store at {host}:{port} is gone, or was not there within {self.patience:g} seconds "
                f"(--core-start-timeout); if torchrun's launcher there has ended, start it again on all nodes: {error}"
            ) from error


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


def when_orphaned(end: Callable[[], object]) -> None:
    """Call ``end``, in another thread, once this process's launcher is gone: whatever this one waits for then."""

    def watch() -> None:
        while os.getppid() == LAUNCHER:
            time.sleep(1.0)
        time.sleep(_ORPHAN_SECONDS)
        logger.error("this process ends: %s", launcher_gone())
        end()

    threading.Thread(target=watch, name="hardpoint-launcher-watch", daemon=True).start()


def launcher_gone() -> EngineDeadError:
    """The error of a rank without the process that started it, and that would have ended it."""
    return EngineDeadError(
        f"torchrun's launcher on {socket.gethostname()}, process {LAUNCHER}, is gone; start torchrun again on all nodes"
    )


def built_no_engine(ranks: Iterable[int], patience: float) -> EngineDeadError:
    """The error where these did not come."""
    return EngineDeadError(
        f"of torchrun's processes, ranks {list(ranks)} built no engine within {patience:g} seconds "
        "(--core-start-timeout); every process must run the same script"
    )
