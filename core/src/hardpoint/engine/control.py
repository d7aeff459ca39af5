"""What an engine's owner does to it while it lives, beside sending requests: sleep, new weights, reports, profiles.

Importing this imports no torch: a front end whose core has its own process needs none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, get_args

from hardpoint_plugin_api import ConfigError, MemorySnapshot, MemoryTag, UnknownNameError

if TYPE_CHECKING:
    import torch

    from hardpoint.metrics import MetricsSnapshot

TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
SLEEP_LEVELS: dict[int, tuple[MemoryTag, ...]] = {1: ("kv", "resources"), 2: ("kv", "resources", "weights")}
"""What each level of sleep gives back."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held by tag, and the device as its platform sees it, where other memory and other processes count too."""

    by_tag: dict[str, int]
    device: MemorySnapshot

    def __str__(self) -> str:
        held = ", ".join(f"{tag} {_mib(nbytes)}" for tag, nbytes in self.by_tag.items())
        return f"{held}; {_mib(self.device.free)} of {_mib(self.device.total)} free"


class CoreControl(Protocol):
    """The core's side of LLM's methods of these names; each runs between two steps."""

    def sleep(self, tags: Collection[MemoryTag]) -> frozenset[MemoryTag]:
        """Give back the memory of ``tags`` and return all that sleep. Without kv, every cached prefix is forgotten.

        Raises EngineError while requests are under way.
        """
        ...

    def wake_up(self, tags: Collection[MemoryTag]) -> frozenset[MemoryTag]:
        """Take the memory of those of ``tags`` that sleep, and return what sleeps on.

        Raises CapacityError where the memory is gone, CheckpointError and EngineError where weights cannot be read.
        """
        ...

    def update_weights(self, source: str | Iterable[tuple[str, torch.Tensor]]) -> frozenset[MemoryTag]:
        """Replace the weights by those of a folder or hub id, or by tensors by name; returns what sleeps.

        Raises EngineError while requests are under way; CheckpointError: for a folder before anything has changed, for
        tensors with the weights gone.
        """
        ...

    def memory_report(self) -> MemoryReport:
        """Who holds how much of the device's memory."""
        ...

    def metrics(self) -> MetricsSnapshot:
        """What the engine and its plugins counted so far."""
        ...

    def start_profile(self, folder: str, layers: bool = False) -> None:
        """Start a profile, written into ``folder`` when it is stopped, with a range for each layer if wanted.

        Raises EngineError where one is taken already, PlatformError where the platform has no profiler.
        """
        ...

    def stop_profile(self) -> None:
        """End the profile and write it. Raises EngineError where none is taken."""
        ...


def sleep_tags(level: int, tags: Sequence[str] | None) -> tuple[MemoryTag, ...]:
    """The tags to give back: ``tags``, or else those of ``level``. Raises ConfigError for what is neither."""
    if tags is not None:
        return check_tags(tags)
    if level not in SLEEP_LEVELS:
        meaning = "; ".join(f"{number} gives back {', '.join(held)}" for number, held in SLEEP_LEVELS.items())
        raise ConfigError(f"sleep level {level!r} is invalid: {meaning}")
    return SLEEP_LEVELS[level]


def check_tags(tags: Sequence[str]) -> tuple[MemoryTag, ...]:
    """``tags``, each of which can sleep. Raises UnknownNameError."""
    known = SLEEP_LEVELS[max(SLEEP_LEVELS)]
    for tag in (tags,) if isinstance(tags, str) else tags:
        if tag not in known:
            raise UnknownNameError("memory tag that can sleep:", str(tag), known)
    return cast("tuple[MemoryTag, ...]", (tags,) if isinstance(tags, str) else tuple(tags))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
