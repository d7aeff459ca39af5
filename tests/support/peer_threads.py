"""The all-to-all over peer memory among ranks in threads, its kernels in Triton's interpreter."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
from triton.runtime import interpreter

from hardpoint.conformance import ranks
from hardpoint.parallel.process_group import Store
from hardpoint_cuda import peer_all2all
from tests.kernels.interpreter import interpret

PROGRAMS = 3
"""Of a launch: they run one after the other here, and a few are enough to have several tokens each."""


class Addresses:
    """As PeerMemory, for ranks in threads: each reaches the others' memory at its own address.

    Memory of a rank that has left stays, as an opened handle keeps it.
    """

    _kept: ClassVar[list[torch.Tensor]] = []

    def __init__(
        self, own: torch.Tensor, store: Store, rank: int, world: int, seconds: float, instead: str = ""
    ) -> None:
        self._kept.append(own)
        store.set(f"memory/{rank}", str(own.data_ptr()))
        patience = timedelta(seconds=max(seconds, 120))  # whatever a test gives collectives: processors may be shared
        store.wait([f"memory/{other}" for other in range(world)], patience)
        self.pointers = tuple(int(store.get(f"memory/{other}")) for other in range(world))
        self._store, self._rank, self._world = store, rank, world

    def close(self) -> None:
        """As PeerMemory."""
        self._store.set(f"left/{self._rank}", "yes")
        self._store.wait([f"left/{rank}" for rank in range(self._world)])


class _OfThread:
    """An attribute whose value each thread has for itself."""

    def __init__(self, values: threading.local, name: str) -> None:
        self._values, self._name = values, name

    def __get__(self, owner: object, kind: type | None = None) -> object:
        return getattr(self._values, self._name)

    def __set__(self, owner: object, value: object) -> None:
        setattr(self._values, self._name, value)


def interpret_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process interprets kernels, several at a time; the all-to-all meets by ``Addresses``.

    Triton's interpreter keeps which program it runs in one place: here each thread has its own.
    """
    interpret()
    Addresses._kept.clear()  # ranks of earlier tests have all left
    here = threading.local()
    for name in ("grid_idx", "grid_dim"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, _OfThread(here, name), raising=False)
    monkeypatch.setattr(ranks, "SECONDS", 120.0)  # of a trial: the interpreter takes longer than a device
    monkeypatch.setattr(peer_all2all, "PeerMemory", Addresses)
    monkeypatch.setattr(peer_all2all, "PROGRAMS", PROGRAMS)
