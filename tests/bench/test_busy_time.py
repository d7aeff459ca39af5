"""Profiled steps: which kernels ran, and what came late."""

from __future__ import annotations

import pytest

from hardpoint.bench.busy_time import BusyTime, Interval


def test_steps_alike() -> None:
    """A step of 100 us: a kernel of 40, one of 10 twice with 5 us before the second, 35 us idle; cut at both ends."""
    step = [("norm", 0, 10), ("matmul", 10, 50), ("norm", 55, 65)]
    recorded = [Interval(n, a + 100 * k, b + 100 * k) for k in range(6) for n, a, b in step]
    found = BusyTime.of_repeated(recorded[2:-1], num_steps=6)
    assert found is not None
    assert found.step == pytest.approx(100)
    assert found.busy == pytest.approx(60)
    assert [(s.name, s.times, s.microseconds) for s in found.kernels] == [("matmul", 1, 40), ("norm", 2, 20)]
    assert [(s.name, s.times, s.microseconds) for s in found.idle] == [("norm", 2, 40)]


def test_a_kernel_that_runs_now_and_then_marks_no_steps() -> None:
    """Steps end where the one does that runs in every step."""
    recorded = [Interval("model", 10 * k, 10 * k + 8) for k in range(8)]
    recorded += [Interval("place pages", 10 * k + 8, 10 * k + 9) for k in (1, 5)]
    found = BusyTime.of_repeated(recorded, num_steps=8)
    assert found is not None
    assert found.step == pytest.approx(10)


def test_kernels_side_by_side_count_once() -> None:
    found = BusyTime.of_all([Interval("a", 0, 10), Interval("b", 5, 20), Interval("c", 22, 30)], num_steps=1)
    assert found is not None
    assert (found.step, found.busy) == (30, 28)
    assert [(s.name, s.microseconds) for s in found.kernels] == [("a", 10), ("b", 10), ("c", 8)]


def test_nothing_recorded() -> None:
    assert BusyTime.of_all([], 1) is None
    assert BusyTime.of_repeated([], 1) is None
    assert BusyTime.of_repeated([Interval("a", 0, 1)], 1) is None
