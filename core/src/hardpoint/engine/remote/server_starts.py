"""Starts of replicas that share experts and belong to several servers: all start together and alike, again and again.

The server that has replica 0 serves a store as long as it lives. Starts are numbered there. A core joins the one that
is gathering, which is complete, and closed, once a core of each replica has come. A core whose replica fails is started
again by its server, and joins the next start; the others' cores end since they miss it, and come as well. So a server
that was itself started again joins like any other, and nobody knows the servers but by their replicas.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from hardpoint.config import EngineConfig
from hardpoint.engine.execution.ranks.round_links import absent
from hardpoint_plugin_api import EngineDeadError

if TYPE_CHECKING:
    from hardpoint.parallel.process_group import Store, TCPStore

_GRACE_SECONDS = 10.0
"""As in ``muster``: for a core to fail by itself, with a reason, where another replica starts again."""
_WAIT_SECONDS = 3600.0
"""The length of one of the waits of which a wait without end is made."""
_NUMBER = "number"
"""The key of the start that is gathering; absent for the first."""

Lost = Callable[[EngineDeadError], None]


def serve_starts(config: EngineConfig) -> TCPStore | None:
    """The store, where this server has replica 0; it lives as long as what is returned. None for other servers.

    Raises PlatformError where its port is taken.
    """
    from hardpoint.parallel.process_group import tcp_store

    if config.rendezvous is None or 0 not in config.local_replicas:
        return None
    return tcp_store(*config.rendezvous, float(config.core_start_timeout), serves=True)


def join_start(config: EngineConfig, lost: Lost) -> EngineConfig:
    """Wait for the cores of all replicas; returns the config of this start, with what failures have taught any of them.

    ``lost`` is called, from another thread, where this core is still there some seconds after another replica has
    started again. Raises PlatformError and EngineDeadError where the store, or a replica, does not come within
    ``core_start_timeout`` seconds.
    """
    until = time.monotonic() + config.core_start_timeout
    while True:
        store = _connected(config, until - time.monotonic())
        try:
            number, config = _gathered(store, config, until)
            break
        except RuntimeError as error:  # the server that served the store has ended: wait for its successor
            if time.monotonic() >= until:
                raise EngineDeadError(
                    f"the server of replica 0 ended within {config.core_start_timeout} seconds (--core-start-timeout), "
                    "and no other took its place; start it again"
                ) from error
    own = _connected(config, config.core_start_timeout)  # a thread that waits keeps others from using its connection
    threading.Thread(target=_watch, args=(own, number + 1, lost), name="hardpoint-starts", daemon=True).start()
    return config.meeting_in(str(number))


def _connected(config: EngineConfig, patience: float) -> Store:
    from hardpoint.parallel.process_group import PrefixStore, tcp_store

    assert config.rendezvous is not None
    return PrefixStore("starts", tcp_store(*config.rendezvous, max(1.0, patience)))


def _gathered(store: Store, config: EngineConfig, until: float) -> tuple[int, EngineConfig]:
    """Join the start that is gathering, and wait for the others. Raises RuntimeError where the store is gone."""
    topology, number = config.topology, int(store.compare_set(_NUMBER, "", "0"))
    store.set(f"{number}/replica-{topology.replica}", json.dumps([config.deny, config.blame_ops]))
    store.set(f"{number}/begun", str(topology.replica))
    keys = [f"{number}/replica-{replica}" for replica in range(topology.data)]
    try:
        store.wait(keys, timedelta(seconds=max(0.1, until - time.monotonic())))
    except RuntimeError:
        if time.monotonic() < until:
            raise
        missing = [replica for replica, key in enumerate(keys) if not store.check([key])]
        raise absent(missing, config.core_start_timeout) from None
    store.compare_set(_NUMBER, str(number), str(number + 1))
    for key in keys:
        deny, blame_ops = json.loads(store.get(key))
        config = config.learning(map(str, deny), blame_ops=bool(blame_ops))
    return number, config


def _watch(store: Store, following: int, lost: Lost) -> None:
    """Call ``lost`` once a core has joined the start ``following``, or the store is gone, and time has passed."""
    key, missed = f"{following}/begun", "the server of replica 0 is gone"
    with suppress(RuntimeError):
        while not store.check([key]):
            with suppress(RuntimeError):
                store.wait([key], timedelta(seconds=_WAIT_SECONDS))
        missed = f"replica {store.get(key).decode()} starts again"
    time.sleep(_GRACE_SECONDS)
    lost(EngineDeadError(f"{missed}, with which this one shares experts"))
