"""Rounds: replicas run as many steps as each other, whoever begins, and see when another one is gone."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hardpoint.engine.execution.ranks import rounds as rounds_module
from hardpoint.engine.execution.ranks.rounds import Rounds, Share, captured_by_all
from hardpoint_plugin_api import EngineDeadError, EngineError
from tests.support.engines import until

EMPTY = Share(1, frozenset({2, 4, 8}))
STEPS = [Share(10), Share(11, frozenset({16})), Share(12, frozenset({16, 2**40}))]


def joined(folder: Path, replicas: int, seconds: float = 20.0) -> list[Rounds]:
    with ThreadPoolExecutor(replicas) as pool:
        numbers = range(replicas)
        return list(pool.map(lambda number: Rounds.join(number, replicas, folder, 20.0, seconds), numbers))


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
    with pytest.raises(EngineDeadError, match=r"replica 1 did not take part in a step within 0\.02 seconds"):
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
        Rounds.join(1, 2, tmp_path, 0.0, 1.0)
    with pytest.raises(EngineError, match=r"cannot meet at .*: AF_UNIX path too long; set TMPDIR"):
        Rounds.join(0, 2, tmp_path / ("long" * 40), 0.0, 1.0)
