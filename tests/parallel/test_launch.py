"""Processes that torchrun started find out which of them belong together, beside what former ones have left."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client

import pytest

from hardpoint.engine.execution.ranks import launch
from hardpoint.engine.execution.ranks.launch import Launch
from hardpoint.engine.execution.ranks.torchrun_executor import _accepted
from hardpoint.parallel.process_group import LOOPBACK, tcp_store
from hardpoint.parallel.topology import Coordinates, Topology
from hardpoint_plugin_api import EngineDeadError


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Three processes, in threads of this one, and a store as torchrun's agent has it."""
    store = tcp_store(LOOPBACK, 0, 30, serves=True)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield [Launch(Coordinates(Topology(tensor=3), rank), (LOOPBACK, store.port)) for rank in range(3)]
    del store


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_all_of_an_attempt_have_one_name(order: tuple[int, ...], launches: list[Launch]) -> None:
    names: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):  # each with what the one before has left
            found = {future.result(30) for future in [pool.submit(launches[n].join_attempt, 20) for n in order]}
            assert len(found) == 1
            names += found
    assert len(set(names)) == 3


def test_an_attempt_that_ended_before_all_had_come(launches: list[Launch]) -> None:
    with pytest.raises(EngineDeadError, match=r"of torchrun's processes, ranks \[1, 2\] built no engine within 0.1 s"):
        launches[0].join_attempt(0.1)
    with pytest.raises(EngineDeadError, match=r"ranks \[0\] built no engine within 0.1 seconds \(--core-start-timeout"):
        launches[1].join_attempt(0.1)
    with ThreadPoolExecutor(3) as pool:
        assert len({future.result(30) for future in [pool.submit(each.join_attempt, 20) for each in launches]}) == 1


def test_rank_0_serves_the_store_as_long_as_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchrun's agent has none, as with launchers that set the variables alone."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(launch, "_kept", [])
    both = [Launch(Coordinates(Topology(tensor=2), rank), (LOOPBACK, port)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert len({future.result(30) for future in [pool.submit(each.join_attempt, 20) for each in both]}) == 1
    both[1].store("later").set("key", "value")
    assert both[0].store("later").get("key") == b"value"


def test_commands_leave_at_once(launches: list[Launch]) -> None:
    """TCP holds no step back until the one before is acknowledged."""
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(_accepted, launches[0], launches[0].store("own"), None, 20.0)
        store = launches[1].store("own")
        for rank in (1, 2):
            link = json.loads(store.get("link/0"))
            with Client((link["host"], link["port"]), authkey=bytes.fromhex(link["key"])) as connection:
                connection.send((rank, "elsewhere"))
        for peer in accepting.result(30):
            assert peer.called == f"rank {peer.number} on elsewhere"
            with peer.connection, socket.socket(fileno=os.dup(peer.connection.fileno())) as same:
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
