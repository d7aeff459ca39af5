"""How the cores and ranks of replicas that share experts find each other.

Replicas of one server meet by files. Several servers meet at a store that the one with replica 0 serves (see
``server_starts``), and processes that torchrun started at torchrun's.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.config import EngineConfig
from hardpoint.engine.execution.ranks.round_links import met_at_store, met_in_folder
from hardpoint_plugin_api import EngineDeadError

if TYPE_CHECKING:
    from hardpoint.parallel.process_group import Store

_RETRY_SECONDS = 0.02


def meet(config: EngineConfig) -> dict[int, Connection]:
    """A connection to the core of each other replica, by its number; see round_links."""
    topology, patience = config.topology, float(config.core_start_timeout)
    if config.executor_kind == "torchrun":
        from hardpoint.engine.execution.ranks.launch import Launch
        from hardpoint.parallel.process_group import PrefixStore

        launch = Launch.read(config)
        store: Store = PrefixStore(str(len(config.deny)), launch.store(config.meeting))  # as in meeting_place
        host, is_here = launch.own_host, launch.place.on_one_host
    elif (rendezvous := config.rendezvous) is not None:
        from hardpoint.parallel.process_group import own_address

        store, host, is_here = servers_store(config), own_address(*rendezvous), False
    else:
        return met_in_folder(topology.replica, topology.data, Path(config.meeting), patience)
    return met_at_store(topology.replica, topology.data, store, host, patience, on_one_host=is_here)


def servers_store(config: EngineConfig) -> Store:
    """A connection to the store of several servers, to the part of this start of all. Raises PlatformError where it
    does not come."""
    from hardpoint.parallel.process_group import PrefixStore, tcp_store

    assert config.rendezvous is not None
    store = tcp_store(*config.rendezvous, float(config.core_start_timeout))
    return PrefixStore(f"start-{config.meeting}-{len(config.deny)}", store)


def meeting_place(config: EngineConfig, name: str) -> Path:
    """The file ``name`` in the folder of the replicas.

    A start that finds a kernel at fault is repeated on all of them without the kernel, and has a file of its own.
    """
    return Path(config.meeting) / f"{name}-{len(config.deny)}"


def leave_word(place: Path, word: str) -> None:
    """Write the file at ``place``, for those who wait for it."""
    unfinished = place.with_suffix(".new")
    unfinished.write_text(word)
    os.replace(unfinished, place)


def await_word(place: Path, patience: float) -> str:
    """The text that is, or will be, at ``place``. Raises EngineDeadError after ``patience`` seconds without."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return place.read_text()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"replica 0, with which this one shares experts, did not come within {patience:g} seconds "
                    "(--core-start-timeout)"
                ) from None
            time.sleep(_RETRY_SECONDS)
