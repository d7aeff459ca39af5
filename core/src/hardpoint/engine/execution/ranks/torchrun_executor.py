"""Ranks in processes that ``torchrun`` started, each of which runs the user's script.

Rank 0 drives: its script goes on with an engine. In every other process the script gets as far as building the engine,
and the process then serves as a rank and ends. Rank 0 talks to the others by sockets, to itself by a pipe. Where
replicas share experts, all this holds for each replica.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
from functools import partial
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING

from hardpoint import fork_server
from hardpoint.config import EngineConfig
from hardpoint.engine.execution.ranks.launch import Launch, built_no_engine, launcher_gone, when_orphaned
from hardpoint.engine.execution.ranks.rank_process import Rank, RankFailed, RankReady, RankSpec, end_with_parent
from hardpoint.engine.execution.ranks.ranks_executor import RankLink, RanksExecutor
from hardpoint.engine.execution.ranks.sockets import set_up, shut
from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.calls import Failure, Stop
from hardpoint.parallel.process_group import LOOPBACK, Store
from hardpoint.parallel.topology import LAUNCHER
from hardpoint_plugin_api import EngineDeadError

if TYPE_CHECKING:
    from hardpoint.engine.blueprint import Blueprint

_LINK = "link/{}"
"""Where rank 0 of a replica leaves in the store how to reach it."""


def serve_unless_first(config: EngineConfig, *, outlives_signals: bool = False) -> EngineConfig:
    """Return the config of this process's replica in its rank 0. In another rank's process serve until the engine is
    closed, then raise SystemExit: with 1 where the engine was lost, so that torchrun starts all again if it is to."""
    if config.meeting:  # a server's, which has met the others
        return config
    launch = Launch.read(config)
    if launch.place.rank:
        when_orphaned(partial(os._exit, 1))
    config = config.meeting_in(launch.join_attempt(float(config.core_start_timeout)))
    if config.topology.shares_experts:
        config = config.of_launched(launch.place.topology.replica)
    if launch.place.rank:
        raise SystemExit(_serve(config, launch, outlives_signals=outlives_signals))
    return config


def _serve(config: EngineConfig, launch: Launch, *, outlives_signals: bool) -> int:
    """Serve as the rank that this process is. Returns the process's exit code."""
    store = launch.store(config.meeting)
    link = json.loads(store.get(_LINK.format(launch.place.topology.replica)))
    if config.block_size is None and link["block_size"] is not None:  # larger blocks, which rank 0 chose for states
        config = config.with_block_size(link["block_size"])
    connection = set_up(Client((link["host"], link["port"]), authkey=bytes.fromhex(link["key"])))
    connection.send((launch.place.rank, socket.gethostname()))
    send, failed = child_process.Sender(connection), threading.Event()

    def report(message: object) -> None:
        if isinstance(message, RankFailed):
            failed.set()
        elif isinstance(message, RankReady) and outlives_signals:
            for each in fork_server.GROUP_SIGNALS:
                signal.signal(each, signal.SIG_IGN)
        send(message)

    rank = Rank(RankSpec(config, launch.place))

    def why(is_orphan: bool) -> EngineDeadError:
        left = f"rank 0 on {link['host_name']} has closed its connection, and says why if it can"
        return launcher_gone() if is_orphan else EngineDeadError(left)

    end_with_parent(rank, connection, LAUNCHER, report, why)
    rank.run(lambda: store, report)
    return int(failed.is_set() or rank.abandoned.is_set())


class TorchrunExecutor(RanksExecutor):
    """Runs rank 0 in a thread of this process, and waits for the other ranks to call."""

    def __init__(self, blueprint: Blueprint) -> None:
        """Wait until all ranks are loaded. Raises what the first of them raises, and EngineDeadError."""
        config = blueprint.config
        launch, patience = Launch.read(config), float(config.core_start_timeout)
        store = launch.store(config.meeting)
        # Two threads must not share a store: one that waits for a key keeps the other from setting it.
        others = _accepted(launch, store, config.block_size, patience)
        super().__init__(config, [ThreadRank(RankSpec(config, launch.place), store), *others])


def _accepted(launch: Launch, store: Store, block_size: int | None, patience: float) -> list[RankLink]:
    """The other ranks, in their order. Raises EngineDeadError for one that does not call within ``patience`` seconds.

    They take ``block_size`` where nobody set theirs.

    A caller must show a key that is in the store alone, since messages from these sockets are unpickled.
    """
    key = secrets.token_bytes(32)
    local, world = launch.place.on_one_host, launch.place.topology.size
    with Listener((LOOPBACK if local else "", 0), backlog=world, authkey=key) as listener:
        here = {"host": launch.own_host, "host_name": socket.gethostname()}
        link = here | {"port": listener.address[1], "key": key.hex(), "block_size": block_size}
        store.set(_LINK.format(launch.place.topology.replica), json.dumps(link))
        listener._listener._socket.settimeout(patience)  # type: ignore[attr-defined]  # there is no public way
        found: dict[int, RankLink] = {}
        while len(found) < world - 1:
            try:
                connection = set_up(listener.accept())
            except (AuthenticationError, EOFError, ConnectionError):  # a stranger
                continue
            except TimeoutError:
                raise built_no_engine(sorted(set(range(1, world)) - set(found)), patience) from None
            number, host = connection.recv()
            found[number] = TorchrunPeer(number, connection, host)
    return [found[number] for number in sorted(found)]


class ThreadRank(RankLink):
    """A rank in a thread of this process, which hears and answers by a pipe like any other."""

    def __init__(self, spec: RankSpec, store: Store) -> None:
        ours, self._theirs = Pipe()
        super().__init__(spec.place.rank, ours)
        self._rank, self._store, self._send = Rank(spec), store, child_process.Sender(self._theirs)
        self._thread = threading.Thread(target=self._run, name=f"hardpoint-rank-{self.number}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._listen, name=f"hardpoint-rank-{self.number}-listener", daemon=True).start()

    def _run(self) -> None:
        self._rank.run(lambda: self._store, self._send)
        shut(self._theirs)

    def _listen(self) -> None:
        if self._rank.listen(self._theirs, LAUNCHER, self._send):
            self._send(RankFailed(Failure.of(launcher_gone())))
        self._thread.join()  # a connection must not be closed while another thread writes to it
        self._theirs.close()

    def join(self, seconds: float) -> None:
        """See RankLink."""
        self._thread.join(seconds)

    def end(self) -> None:
        """Break off what waits for other ranks. A thread cannot be killed: one that hangs goes with the process."""
        if self._thread.is_alive():
            self._rank.commands.put(Stop())
            self._rank.abort()

    def obituary(self) -> str:
        """See RankLink."""
        return f"rank {self.number}, a thread of this process, has ended"


class TorchrunPeer(RankLink):
    """A rank in another process that torchrun started. It ends when its connection does."""

    def __init__(self, number: int, connection: Connection, host: str) -> None:
        super().__init__(number, connection)
        self._host = host

    @property
    def called(self) -> str:
        """See RankLink."""
        return f"rank {self.number} on {self._host}"

    def join(self, seconds: float) -> None:
        """Nothing to wait for: torchrun does that."""

    def end(self) -> None:
        """See RankLink."""
        if not self.connection.closed:
            shut(self.connection)

    def obituary(self) -> str:
        """See RankLink."""
        return f"the process of {self.called} has ended, or its host is gone: see torchrun's report, and its stderr"
