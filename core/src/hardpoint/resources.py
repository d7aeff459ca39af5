"""Scratch memory of one engine, as declared through the build context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hardpoint_plugin_api import CapacityError, Scope


@dataclass
class _Declared:
    nbytes: int
    align: int
    scope: Scope


class EngineResources:
    """Declared while the model is built, counted before the block pool is sized, allocated before the first step.

    Memory for collectives comes first, in the order of its declarations, before any group of ranks is joined. It stays
    while the engine sleeps, since other ranks may hold its address. The addresses of the rest stay until the engine
    sleeps: ``drop`` gives the memory back and ``restore`` takes it again, elsewhere.
    """

    def __init__(self) -> None:
        self._declared: dict[str, _Declared] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._shared: dict[str, torch.Tensor] | None = None
        self._device: torch.device | None = None

    def declare(self, key: str, nbytes: int, align: int = 256, scope: Scope = "engine") -> None:
        """Ask for ``nbytes``; equal keys share one allocation of the largest size. Raises CapacityError when late."""
        if self._device is not None:
            raise CapacityError(f"resource {key!r} was declared after memory was allocated; declare it when building")
        known = self._declared.get(key)
        if self._shared is not None and (scope == "collective" or (known and known.scope == "collective")):
            raise CapacityError(f"resource {key!r} for collectives was declared after the groups of ranks were joined")
        if known:
            nbytes, align = max(nbytes, known.nbytes), max(align, known.align)
            scope = "collective" if known.scope == "collective" else scope
        self._declared[key] = _Declared(nbytes, align, scope)

    @property
    def total_bytes(self) -> int:
        """The bytes that ``allocate`` will take, alignment included."""
        return sum(d.nbytes + d.align for d in self._declared.values())

    def allocate_collective(self, device: torch.device) -> None:
        """Take the memory of what was declared for collectives, full of zeros."""
        wanted = {key: need for key, need in self._declared.items() if need.scope == "collective"}
        self._shared = {key: _allocated(need, device) for key, need in wanted.items()}

    def allocate(self, device: torch.device) -> None:
        """Take the memory of everything else declared so far, full of zeros."""
        self._device = device
        for key, need in self._declared.items():
            if need.scope != "collective":
                self._memory[key] = _allocated(need, device)

    @contextmanager
    def extended(self) -> Iterator[None]:
        """Let kernels that take others' place declare more within the block, and allocate it at the block's end.

        A buffer that grows gets another address. Raises CapacityError for collectives.
        """
        device, self._device = self._device, None
        try:
            yield
        finally:
            self._device = device
        assert device is not None, "extended before it was allocated"
        for key, need in self._declared.items():
            known = self._memory.get(key)
            if need.scope != "collective" and (known is None or known.numel() < need.nbytes):
                self._memory[key] = _allocated(need, device)

    def get(self, key: str) -> torch.Tensor:
        """The memory (uint8 [nbytes]) of a declared key. Raises CapacityError where it is not allocated."""
        if key in self._memory:
            return self._memory[key]
        if self._shared is not None and key in self._shared:
            return self._shared[key]
        if key in self._declared and self._device is not None:
            raise CapacityError(f"resource {key!r} is asleep; it comes back when the engine wakes up")
        raise CapacityError(f"resource {key!r} is not allocated; declare it when the layer is built")

    def drop(self) -> None:
        """Give the memory back. A tensor of it that is still held keeps its memory."""
        self._memory.clear()

    def restore(self) -> None:
        """Take the memory again, full of zeros."""
        assert self._device is not None, "restored before it was allocated"
        self.allocate(self._device)

    def clear(self) -> None:
        """Fill with zeros what has kept its address while its memory was away."""
        for memory in self._memory.values():
            memory.zero_()


def _allocated(need: _Declared, device: torch.device) -> torch.Tensor:
    raw = torch.zeros(need.nbytes + need.align, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % need.align
    return raw[start : start + need.nbytes]
