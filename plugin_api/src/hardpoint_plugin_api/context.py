"""The build context as plugins see it: handed explicitly to everything that is constructed.

There is no process-wide current platform, device or config. Two engines on two platforms can live in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.manifest import ConfigValue

if TYPE_CHECKING:
    import torch

Scope = Literal["step", "engine", "collective"]


class Resources(Protocol):
    """Scratch memory, declared at build and counted before the block pool is sized."""

    def declare(self, key: str, nbytes: int, align: int = 256, scope: Scope = "engine") -> None:
        """Ask for ``nbytes``; equal keys share one allocation of the largest size asked for."""
        ...

    def get(self, key: str) -> torch.Tensor:
        """The memory (uint8 [nbytes]) of a declared key; its address stays the same for the engine's life."""
        ...


class Metrics(Protocol):
    """Counters and gauges of kernels and backends."""

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        ...

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        ...


@runtime_checkable
class BuildContext(Protocol):
    """What a layer, op factory or backend is constructed with."""

    @property
    def path(self) -> str:
        """Dotted path of the layer under construction, for ignore lists, ``explain`` and errors. Never in forward."""
        ...

    @property
    def device(self) -> DeviceInfo:
        """The device as data."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The activations' dtype."""
        ...

    @property
    def resources(self) -> Resources:
        """Scratch memory."""
        ...

    @property
    def metrics(self) -> Metrics:
        """Counters and gauges."""
        ...

    def child(self, name: str) -> Self:
        """The same context, one path element deeper."""
        ...

    def plugin_config(self, plugin: str) -> Mapping[str, ConfigValue]:
        """The settings of one plugin's section, defaults filled in."""
        ...
