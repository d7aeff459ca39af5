"""Scratch memory and metrics of one engine, as declared through the build context."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hardpoint_plugin_api import CapacityError, Scope


@dataclass
class _Declared:
    nbytes: int
    align: int
    scope: Scope


class EngineResources:
    """Declared while the model is built, counted before the block pool is sized, allocated once, stable after that."""

    def __init__(self) -> None:
        self._declared: dict[str, _Declared] = {}
        self._memory: dict[str, torch.Tensor] = {}

    def declare(self, key: str, nbytes: int, align: int = 256, scope: Scope = "engine") -> None:
        """Ask for ``nbytes``; equal keys share one allocation of the largest size. Raises CapacityError when late."""
        if key in self._memory:
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
        """Take the memory of everything declared so far."""
        for key, need in self._declared.items():
            raw = torch.empty(need.nbytes + need.align, dtype=torch.uint8, device=device)
            start = -raw.data_ptr() % need.align
            self._memory[key] = raw[start : start + need.nbytes]

    def get(self, key: str) -> torch.Tensor:
        """The memory (uint8 [nbytes]) of a declared key. Raises CapacityError for one that was not declared in time."""
        if key not in self._memory:
            raise CapacityError(f"resource {key!r} is not allocated; declare it when the layer is built")
        return self._memory[key]


@dataclass
class EngineMetrics:
    """Counters and gauges by name."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add ``amount`` to a counter."""
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.gauges[name] = value
