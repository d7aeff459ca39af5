"""The build context as plugins see it: handed explicitly to everything that is constructed.

There is no process-wide current platform, device or config. Two engines on two platforms can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.manifest import ConfigValue

if TYPE_CHECKING:
    import torch

    from hardpoint_plugin_api.cache_users import CacheUsers
    from hardpoint_plugin_api.communicator import Parallel

Scope = Literal["step", "engine", "collective"]


class Resources(Protocol):
    """Scratch memory, declared at build and counted before the block pool is sized."""

    def declare(self, key: str, nbytes: int, align: int = 256, scope: Scope = "engine") -> None:
        """Ask for ``nbytes``; equal keys share one allocation of the largest size asked for."""
        ...

    def get(self, key: str) -> torch.Tensor:
        """The memory (uint8 [nbytes]) of a declared key, full of zeros when it is new.

        Its address stays the same until the engine is put to sleep. Ask again where a step begins (in ``plan``) rather
        than keep the tensor: one that is kept holds on to memory that sleep is meant to give back.
        """
        ...


@dataclass(frozen=True)
class EngineLimits:
    """The most that a step of the engine holds, padding included: what workspaces have to be large enough for.

    ``max_tokens`` tokens in a step, ``max_sequences`` requests in a step, ``max_model_len`` tokens of one request,
    prompt and output together. An engine may stay below them, where the device or a backend allows less.
    """

    max_tokens: int
    max_sequences: int
    max_model_len: int


class Counter(Protocol):
    """A number that only grows."""

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``, which is not negative."""
        ...

    def labels(self, *values: object, **by_name: object) -> Self:
        """The counter with these values of all its labels. Look it up once and keep it."""
        ...


class Gauge(Protocol):
    """A number that goes up and down."""

    def set(self, value: float) -> None:
        """Replace the value."""
        ...

    def set_function(self, f: Callable[[], float]) -> None:
        """Let ``f`` say the value whenever metrics are read."""
        ...

    def labels(self, *values: object, **by_name: object) -> Self:
        """The gauge with these values of all its labels. Look it up once and keep it."""
        ...


class Histogram(Protocol):
    """How often values fall into each of a range of buckets, and their sum."""

    def observe(self, amount: float) -> None:
        """Count one value."""
        ...

    def time(self) -> AbstractContextManager[object]:
        """Observe the seconds that the block takes on the host."""
        ...

    def labels(self, *values: object, **by_name: object) -> Self:
        """The histogram with these values of all its labels. Look it up once and keep it."""
        ...


class Metrics(Protocol):
    """What an engine and its plugins count, as Prometheus understands it.

    Declare a metric where you are constructed, keep what you get, and call that while steps run. ``name`` is of
    lower-case letters, digits and underscores, without what Prometheus adds itself (``_total``); readers see
    ``hardpoint_acme_name`` for the plugin ``acme``, so that plugins cannot clash. Put the unit last (``_seconds``,
    ``_bytes``). Declared again with the same kind and labels, it is the same metric. A name that is invalid, or that
    another kind of metric has, raises PluginError.
    """

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter."""
        ...

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge."""
        ...

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] | None = None
    ) -> Histogram:
        """Declare a histogram. ``buckets`` are upper bounds, ascending (None: suited to seconds, 5 ms to 10 s)."""
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
    def limits(self) -> EngineLimits:
        """How large steps and requests can become; known before anything is constructed."""
        ...

    @property
    def resources(self) -> Resources:
        """Scratch memory."""
        ...

    @property
    def metrics(self) -> Metrics:
        """What is counted and timed; metrics declared here carry the plugin's name."""
        ...

    @property
    def cache_users(self) -> CacheUsers:
        """Where a layer declares what it keeps of its sequences."""
        ...

    @property
    def parallel(self) -> Parallel:
        """The groups of ranks that this one is in."""
        ...

    @property
    def tuning_folders(self) -> Sequence[Path]:
        """Folders with tuning tables of kernels, the first to be asked first: the user's, the platform plugin's."""
        ...

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark what runs inside, as ``plugin.name``, in a profile; while none is taken this costs next to nothing."""
        ...

    def child(self, name: str) -> Self:
        """The same context, one path element deeper."""
        ...

    def plugin_config(self, plugin: str) -> Mapping[str, ConfigValue]:
        """The settings of one plugin's section, defaults filled in."""
        ...
