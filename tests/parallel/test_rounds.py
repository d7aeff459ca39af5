"""Rounds: replicas run as many steps as each other, whoever begins, and see when another one is gone."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from hardpoint.engine.execution.executor import Executor
from hardpoint.engine.execution.ranks import rounds as rounds_module
from hardpoint.engine.execution.ranks.lock_step import LockStepExecutor
from hardpoint.engine.execution.ranks.round_links import met_at_store, met_in_folder
from hardpoint.engine.execution.ranks.rounds import Rounds, Share, captured_by_all
from hardpoint.parallel.process_group import LOOPBACK, tcp_store
from hardpoint_plugin_api import EngineDeadError, EngineError
from tests.support.engines import until

EMPTY = Share(1, frozenset({2, 4, 8}))
STEPS = [Share(10), Share(11, frozenset({16})), Share(12, frozenset({16, 2**40}))]


def joined(folder: Path, replicas: int, seconds: float = 20.0) -> list[Rounds]:
    with ThreadPoolExecutor(replicas) as pool:
        numbers = range(replicas)
        links = list(pool.map(lambda number: met_in_folder(number, replicas, folder, 20.0), numbers))
    return [Rounds(number, others, seconds) for number, others in enumerate(links)]


def joined_at_store(replicas: int, elsewhere: bool) -> list[Rounds]:
    served = tcp_store(LOOPBACK, 0, 20.0, serves=True)

    def meet(number: int) -> dict[int, Connection]:
        store = tcp_store(LOOPBACK, served.port, 20.0)
        return met_at_store(number, replicas, store, LOOPBACK, 20.0, on_one_host=True)

    with ThreadPoolExecutor(replicas) as pool:
        links = list(pool.map(meet, range(replicas)))
    return [Rounds(number, others, 20.0, others if elsewhere else ()) for number, others in enumerate(links)]


def close(*all_rounds: Rounds) -> None:
    for each in all_rounds:
        each.leave()


def test_whoever_begins_all_learn_the_same(tmp_path: Path) -> None:
    """Three replicas have steps at times of their own; the idle ones answer with empty steps."""
    replicas = joined(tmp_path, 3)
    seen: list[list[tuple[Share, ...]]] = [[], [], []]
    done = threading.Event()

    def serve(number: int) -> None:
        own, draw, called = replicas[number], random.Random(number), threading.Semaphore(0)
        own.when_begun(called.release)
        left = 30
        while not done.is_set():
            if left and draw.random() < 0.5:
                seen[number].append(own.agree(STEPS[number]))
                left -= 1
            elif own.has_begun:
                seen[number].append(own.agree(EMPTY))
            else:
                called.acquire(timeout=0.001)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: all(sum(shares[n] == STEPS[n] for shares in seen[n]) == 30 for n in range(3)))
    until(lambda: len({len(each) for each in seen}) == 1)
    done.set()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1] == seen[2]
    assert all(shares[n] in (EMPTY, STEPS[n]) for shares in seen[0] for n in range(3))
    assert not any(each.has_begun for each in replicas)
    close(*replicas)


def test_a_replica_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "_GRACE", 0.0)
    here, there = joined(tmp_path, 2)
    called = threading.Event()
    here.when_begun(called.set)
    here.check()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.agree, EMPTY)
        time.sleep(0.01)
        there.leave(is_lost=True)
        with pytest.raises(EngineDeadError, match="replica 1 is gone, with which this one shares experts"):
            waiting.result()
    assert called.wait(10)
    with pytest.raises(EngineDeadError, match="replica 1 is gone"):
        here.check()
    close(here, there)


def test_a_replica_whose_ranks_are_lost_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it waits for a step of the other one, which waits to learn who is at fault, and then blames that one."""
    monkeypatch.setattr(rounds_module, "_GRACE", 0.0)
    at_fault, other = joined(tmp_path, 2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(at_fault.agree, EMPTY)
        until(lambda: other.has_begun)
        learning = pool.submit(other.lost_within, 20.0)
        at_fault.break_off()
        with pytest.raises(EngineDeadError, match="this replica's ranks are lost"):
            waiting.result()
        at_fault.leave(is_lost=True)
        assert learning.result() == "replica 0 is gone, with which this one shares experts"
    other.break_off()
    assert other.lost_within(0.0) is not None
    close(other)


def test_a_replica_whose_ranks_are_lost_meets_nobody(tmp_path: Path) -> None:
    """The other one is idle, and may never come."""
    at_fault, other = joined(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(at_fault.meet, "begins sleep", lambda: None)
        at_fault.break_off()
        with pytest.raises(EngineDeadError, match="this replica's ranks are lost"):
            waiting.result(60)
    close(at_fault, other)


def test_a_replica_that_is_closed(tmp_path: Path) -> None:
    """It is missed by a step alone: an idle replica is about to be closed, too."""
    here, there = joined(tmp_path, 2)
    there.leave()
    until(lambda: here._is_closed)
    here.check()
    assert not here.has_begun
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        here.agree(EMPTY)
    close(here, there)


def test_a_replica_that_does_not_answer(tmp_path: Path) -> None:
    here, there = joined(tmp_path, 2, seconds=0.02)
    with pytest.raises(
        EngineDeadError,
        match=r"replica 1, with which this one shares experts, did not take part in a step within 0\.02 seconds",
    ):
        here.agree(EMPTY)
    close(here, there)


@pytest.mark.parametrize(
    ("captured", "expected"),
    [
        (({4, 8, 16}, {2, 4, 8, 16}), 4),
        (({8, 16}, {2, 4, 16}, {1, 2, 4, 8, 16}), 16),
        (({4, 8}, set()), 0),
        (({4}, {2, 3}), 0),
    ],
)
def test_the_size_that_all_can_replay(captured: tuple[set[int], ...], expected: int) -> None:
    assert captured_by_all(Share(1, frozenset(each)) for each in captured) == expected


def test_large_steps_are_not_mostly_padding() -> None:
    sizes = frozenset({512, 2048})
    assert captured_by_all([Share(400, sizes), Share(1, sizes)]) == 512
    long = Share(1900, frozenset({2048}))
    assert captured_by_all([long, Share(3, sizes)]) == 0
    assert captured_by_all([long, Share(200, sizes)]) == 2048


def test_replicas_that_cannot_meet(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match="replica 0, with which this one shares experts, did not come within 0 s"):
        met_in_folder(1, 2, tmp_path, 0.0)
    with pytest.raises(EngineError, match=r"cannot meet at .*: AF_UNIX path too long; set TMPDIR"):
        met_in_folder(0, 2, tmp_path / ("long" * 40), 0.0)


def test_the_replicas_that_do_not_come_are_named(tmp_path: Path) -> None:
    """One of three that are waited for comes."""
    said = r"replicas 1, 3, with which this one shares experts, did not come within 0\.5 seconds \(--core-start-timeout"
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(met_in_folder, 2, 4, tmp_path, 1.0)
        with pytest.raises(EngineDeadError, match=said):
            met_in_folder(0, 4, tmp_path, 0.5)
        with pytest.raises(EngineDeadError, match="replica 1, with which"):
            coming.result()
    served = tcp_store(LOOPBACK, 0, 20.0, serves=True)
    with pytest.raises(EngineDeadError, match=r"replicas 1, 2, with which .* did not come within 0\.2 seconds"):
        met_at_store(0, 3, served, LOOPBACK, 0.2, on_one_host=True)
    with pytest.raises(EngineDeadError, match=r"replica 0, with which .* did not come within 0\.2 seconds"):
        met_at_store(2, 3, served, LOOPBACK, 0.2, on_one_host=True)


def test_messages_leave_at_once(tmp_path: Path) -> None:
    """TCP holds none back until the one before is acknowledged; a socket of this host does so never."""
    replicas = joined_at_store(3, elsewhere=False)
    for each in replicas:
        for connection in each._others.values():
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    close(*replicas, *joined(tmp_path, 2))


def test_replicas_that_finish_keep_up_with_the_others() -> None:
    """Each has other numbers of steps of its own; none leaves before all have run theirs."""
    replicas = joined_at_store(3, elsewhere=False)
    seen: list[list[tuple[Share, ...]]] = [[], [], []]

    def serve(number: int) -> None:
        own = replicas[number]
        for _ in range(5 * number):
            seen[number].append(own.agree(STEPS[number]))
        own.finish(lambda: seen[number].append(own.agree(EMPTY)))
        own.leave()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(serve, range(3)))
    assert seen[0] == seen[1] == seen[2]
    assert [sum(shares[n] == STEPS[n] for shares in seen[0]) for n in range(3)] == [0, 5, 10]


def test_finishing_ends_where_another_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "_GRACE", 0.0)
    here, there = joined_at_store(2, elsewhere=False)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(here.finish, lambda: None)
        there.leave(is_lost=True)
        finishing.result(20)
    close(here, there)


def test_finishing_ends_where_the_own_ranks_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one may run for hours. It learns at once that it cannot go on."""
    monkeypatch.setattr(rounds_module, "_GRACE", 0.0)
    here, there = joined(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(here.finish, lambda: None)
        here.break_off()
        finishing.result(20)
    assert there.lost_within(20.0) == "replica 0 is gone, with which this one shares experts"
    close(here, there)


def test_a_replica_that_finishes_tells_the_others_of_the_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They must not take it for an engine that was closed in good order."""
    with ThreadPoolExecutor(3) as pool:
        links = list(pool.map(lambda number: met_in_folder(number, 3, tmp_path, 20.0), range(3)))
        finishing, going_on = (Rounds(number, links[number], seconds) for number, seconds in ((1, 0.4), (2, 20.0)))
        executor = LockStepExecutor.__new__(LockStepExecutor)
        executor._rounds, executor._is_launched = finishing, True
        executor._ranks = create_autospec(Executor, instance=True)
        monkeypatch.setattr(executor, "keep_up", lambda: finishing.agree(EMPTY))
        ended = pool.submit(executor.shutdown, 5.0)
        with pytest.raises(EngineDeadError, match="replica 1 is gone, with which this one shares experts"):
            going_on.agree(STEPS[2])
        ended.result(20)
    close(going_on)
    for connection in links[0].values():
        connection.close()


def waits(here: Rounds, how: str) -> None:
    """Wait for the others ``how`` one does that nothing limits but their end."""
    if how == "finish":
        here.finish(lambda: None)
        here.check()
    else:
        here.meet("begins Sleep", lambda: None)


@pytest.mark.parametrize("how", ["finish", "meet"])
def test_a_process_that_hangs_is_not_waited_for(how: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda number: met_in_folder(number, 2, tmp_path, 20.0), range(2)))
        here = Rounds(0, links[0], seconds=0.4)
        waiting = pool.submit(waits, here, how)
        said = r"replica 1, with which this one shares experts, did not react within 0\.4 seconds \(--step-timeout\)"
        with pytest.raises(EngineDeadError, match=said):
            waiting.result(20)
    close(here)
    links[1][0].close()


@pytest.mark.parametrize("how", ["finish", "meet"])
def test_a_process_that_runs_is_waited_for(how: str, tmp_path: Path) -> None:
    """However long its script takes, and though it begins no step."""
    here, there = joined(tmp_path, 2, seconds=0.4)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(waits, here, how)
        time.sleep(1.5)
        assert not waiting.done()
        pool.submit(waits, there, how).result(20)
        waiting.result(20)
    close(here, there)


def test_a_replica_of_another_server_that_is_closed() -> None:
    """This one ends, though it has nothing to do: it could never run a step again."""
    here, there = joined_at_store(2, elsewhere=True)
    there.leave()
    said = "replica 1 was closed, with which this one shares experts"
    until(lambda: here._lost is not None)
    with pytest.raises(EngineDeadError, match=said):
        here.check()
    with pytest.raises(EngineDeadError, match=said):
        here.agree(EMPTY)
    close(here, there)


def test_replicas_meet_once_all_have_run_their_steps() -> None:
    """The first that comes takes part in the others' steps."""
    replicas = joined_at_store(3, elsewhere=True)
    seen: list[list[tuple[Share, ...]]] = [[], [], []]
    met: list[int] = []

    def serve(number: int) -> None:
        own = replicas[number]
        for _ in range(5 * number):
            seen[number].append(own.agree(STEPS[number]))
        for said in ("begins Sleep", "did Sleep"):
            own.meet(said, lambda: seen[number].append(own.agree(EMPTY)))
            met.append(len(seen[number]))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(serve, range(3)))
    assert seen[0] == seen[1] == seen[2]
    assert met == [len(seen[0])] * 6
    assert [sum(shares[n] == STEPS[n] for shares in seen[0]) for n in range(3)] == [0, 5, 10]
    close(*replicas)


def test_replicas_that_do_not_do_the_same(tmp_path: Path) -> None:
    """Each is told, and may come again."""
    replicas = joined(tmp_path, 2)
    for said, other in (("begins Sleep", "begins WakeUp"), ("did UpdateWeights", "failed at UpdateWeights")):
        with ThreadPoolExecutor(2) as pool:
            meeting = [pool.submit(one.meet, s, lambda: None) for one, s in zip(replicas, (said, other), strict=True)]
            with pytest.raises(EngineError, match=f"this replica {said}, and replica 1 {other}: all that share exp"):
                meeting[0].result()
            with pytest.raises(EngineError, match=f"this replica {other}, and replica 0 {said}"):
                meeting[1].result()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.meet("begins Sleep", lambda: None), replicas))
    close(*replicas)


def test_a_replica_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has come to its script's end, and then is gone."""
    monkeypatch.setattr(rounds_module, "_GRACE", 0.0)
    here, there = joined_at_store(2, elsewhere=False)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(there.finish, lambda: None)
        with pytest.raises(EngineError, match="this replica begins Sleep, and replica 1 is being closed"):
            here.meet("begins Sleep", lambda: None)
        there.leave(is_lost=True)
        until(lambda: here._lost is not None)
        with pytest.raises(EngineDeadError, match="replica 1 is gone"):
            here.meet("begins Sleep", lambda: None)
    close(here, there)
