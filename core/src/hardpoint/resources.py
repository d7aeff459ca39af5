"""Scratch memory of one engine, as declared through the build context."""

from __future__ import annotations

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

    Addresses stay until the engine sleeps: ``drop`` gives the memory back and ``restore`` takes it again, elsewhere.
    """

    def __init__(self) -> None:
        self._declared: dict[str, _Declared] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._device: torch.device | None = None

    def declare(self, key: str, nbytes: int, align: int = 256, scope: Scope = "engine") -> None:
        """Ask for ``nbytes``; equal keys share one allocation of the largest size. Raises CapacityError when late."""
        if self._device is not None:
            raise CapacityError(f"resource {key!r} was declared after memory was allocated; declare it when building")
        known = self._declared.get(key)
        if known:
            nbytes, align = max(nbytes, known.nbytes), max(align, known.align)
        self._declared[key] = _Declared(nbytes, align, scope)

    @property
    def total_bytes(self) -> int:
        """What ``allocate`` will take, alignment included."""
        return sum(d.nbytes + d.align for d in self._declared.values())

    def allocate(self, device: torch.device) -> None:
        """Take the memory of everything declared so far, full of zeros."""
        self._device = device
        for key, need in self._declared.items():
            raw = torch.zeros(need.nbytes + need.align, dtype=torch.uint8, device=device)
            start = -raw.data_ptr() % need.align
            self._memory[key] = raw[start : start + need.nbytes]

    def get(self, key: str) -> torch.Tensor:
        """The memory (uint8 [nbytes]) of a declared key. Raises CapacityError where it is not allocated."""
        if key in self._memory:
            return self._memory[key]
        if key in self._declared and self._device is not None:
            raise CapacityError(f"resource {key!r} is asleep; it comes back when the engine wakes up")
        raise CapacityError(f"resource {key!r} is not allocated; declare it when the layer is built")

    def drop(self) -> None:
        """Give the memory back. Whoever kept a tensor of it holds on to that much."""
        self._memory.clear()

    def restore(self) -> None:
        """Take the memory again, full of zeros."""
        assert self._device is not None, "restored before it was allocated"
        self.allocate(self._device)

    def clear(self) -> None:
        """Fill with zeros what has kept its address while its memory was away."""
        for memory in self._memory.values():
            memory.zero_()
