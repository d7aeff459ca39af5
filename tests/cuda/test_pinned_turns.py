"""Pinned memory that the device may still read is not written to: its stand-in event is not ready at first."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hardpoint_cuda import flashinfer_plan
from hardpoint_cuda.flashinfer_plan import PinnedTurn

DEVICE = torch.device("cpu")


class Late:
    """An event whose device has still to read ``memory`` until somebody waits; then it has read ``seen``."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.seen: list[list[int]] = []
        self.pending = False

    def record(self) -> None:
        self.pending = True

    def query(self) -> bool:
        return not self.pending

    def synchronize(self) -> None:
        assert self.memory is not None
        self.seen.append(self.memory.tolist())
        self.pending = False


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Late:
    late = Late()
    cuda = SimpleNamespace(Event=lambda: late, synchronize=lambda device: late.synchronize())
    monkeypatch.setattr(flashinfer_plan, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(flashinfer_plan, "_pinned", lambda size: torch.empty(size, dtype=torch.int32))
    return late


def test_what_is_still_read_is_waited_for(event: Late) -> None:
    turn = PinnedTurn(DEVICE)
    _, event.memory = turn.fill(np.array([1, 2], np.int32), np.array([3], np.int32))
    assert event.seen == [], "nothing was submitted yet"
    turn.close()
    _, again = turn.fill(np.array([7, 8, 9], np.int32))
    assert event.seen == [[1, 2, 3]], "the device read what it was given, not what came next"
    assert again.tolist() == [7, 8, 9]


def test_what_was_read_is_not_waited_for(event: Late) -> None:
    turn = PinnedTurn(DEVICE)
    turn.fill(np.array([1], np.int32))
    turn.close()
    event.pending = False
    turn.fill(np.array([2], np.int32))
    assert event.seen == []


def test_a_plan_that_failed_leaves_copies_that_are_waited_for(event: Late) -> None:
    turn = PinnedTurn(DEVICE)
    _, event.memory = turn.fill(np.array([1], np.int32))
    turn.fill(np.array([2], np.int32))  # never closed
    assert event.seen == [[1]]
