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
    """Scratch memory. It is declared at construction, and counted before the KV cache is sized."""

    def declare(self, key: str, nbytes: int, align: int = 256, scope: Scope = "engine") -> None:
        """Ask for ``nbytes``. Declarations of one key share one allocation, of the largest size asked for."""
        ...

    def get(self, key: str) -> torch.Tensor:
        """Return the memory (uint8 [nbytes]) of a declared key. It is zeroed when it is allocated.

        Its address stays the same until the engine is put to sleep. Call this at the start of a step (in ``plan``) and
        do not keep the tensor, or sleep cannot free it.
        """
        ...


@dataclass(frozen=True)
class EngineLimits:
    """Upper bounds of a step, padding included; workspaces must be large enough for them.

    ``max_tokens`` tokens in a step, ``max_sequences`` requests in a step, ``max_model_len`` tokens of one request,
    prompt and output together. The engine may stay below them, where the device or a backend allows less.
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
        """Set the gauge to ``value``."""
        ...

    def set_function(self, f: Callable[[], float]) -> None:
        """Call ``f`` for the value whenever metrics are read."""
        ...

    def labels(self, *values: object, **by_name: object) -> Self:
        """The gauge with these values of all its labels. Look it up once and keep it."""
        ...


class Histogram(Protocol):
    """The number of observed values in each bucket, and their sum."""

    def observe(self, amount: float) -> None:
        """Add ``amount`` to the sum, and one to the count of its bucket."""
        ...

    def time(self) -> AbstractContextManager[object]:
        """Observe the seconds that the block takes on the host."""
        ...

    def labels(self, *values: object, **by_name: object) -> Self:
        """The histogram with these values of all its labels. Look it up once and keep it."""
        ...


class Metrics(Protocol):
    """Prometheus metrics of an engine and its plugins.

    Declare a metric at construction, keep the object, and update it while steps run. ``name`` has lower-case letters,
    digits and underscores, without the suffixes that Prometheus adds (``_total``), and ends with the unit
    (``_seconds``, ``_bytes``). It is exported as ``hardpoint_PLUGIN_NAME``, so that plugins cannot clash. A second
    declaration with the same kind and labels returns the same metric. Raises PluginError for an invalid name, and for
    one that another kind of metric has.
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
    """The context that layers, op factories and backends are constructed with."""

    @property
    def path(self) -> str:
        """The dotted path of the layer under construction. For error messages, ``explain`` and ignore lists; not for
        ``forward``.
        """
        ...

    @property
    def device(self) -> DeviceInfo:
        """The description of the device."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The torch device that tensors live on."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The data type of activations."""
        ...

    @property
    def limits(self) -> EngineLimits:
        """Upper bounds of steps and requests."""
        ...

    @property
    def resources(self) -> Resources:
        """Where a kernel declares scratch memory, and gets it in a step."""
        ...

    @property
    def metrics(self) -> Metrics:
        """Where metrics are declared; those declared here carry the plugin's name."""
        ...

    @property
    def cache_users(self) -> CacheUsers:
        """Where a layer declares the caches that it uses."""
        ...

    @property
    def parallel(self) -> Parallel:
        """The groups of ranks that this rank is in."""
        ...

    @property
    def tuning_folders(self) -> Sequence[Path]:
        """Folders with tuning tables of kernels, in order of precedence: the user's, then the platform plugin's."""
        ...

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark the work inside as ``plugin.name`` in a profile. Nearly free while no profile is taken."""
        ...

    def child(self, name: str) -> Self:
        """Return this context with one more element in ``path``."""
        ...

    def plugin_config(self, plugin: str) -> Mapping[str, ConfigValue]:
        """Return the settings of one plugin, with defaults filled in."""
        ...
