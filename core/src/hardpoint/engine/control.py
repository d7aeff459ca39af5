"""Control verbs: what an engine's owner asks of it beside sending requests (sleep, new weights, reports, profiles).

Importing this imports no torch: a front end whose core has its own process needs none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, Self, TypeVar, cast, get_args

from hardpoint.checkpoint.source import resolve_adapter
from hardpoint.engine.lora import Adapter
from hardpoint_plugin_api import ConfigError, MemorySnapshot, MemoryTag, UnknownNameError

if TYPE_CHECKING:
    import torch

    from hardpoint.metrics import MetricsSnapshot  # as in Verb["MetricsSnapshot"]


R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
SLEEP_LEVELS: dict[int, tuple[MemoryTag, ...]] = {
    1: ("kv", "resources"),
    2: ("kv", "resources", "weights", "adapters"),
}
"""Memory that each level of sleep gives back, by tag."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held by tag, and the device as its platform sees it, where other memory and other processes count too."""

    by_tag: dict[str, int]
    device: MemorySnapshot

    def __str__(self) -> str:
        held = ", ".join(f"{tag} {_mib(nbytes)}" for tag, nbytes in self.by_tag.items())
        return f"{held}; {_mib(self.device.free)} of {_mib(self.device.total)} free"


class Verb(Generic[R_co]):
    """Something that an engine's owner asks of it; it is done between two steps. R is the answer.

    A verb is a frozen dataclass that pickle takes. To add one: declare it here, give it a handler in
    ``engine/core_verbs.py``, and where ranks take part one in ``engine/execution/rank_verbs.py``. It then works for a
    core in this process, in a process of its own, and over ranks, as in ``llm.control(ResetPrefixCache())``.
    """

    takes_a_step: ClassVar[bool] = False
    """Whether ranks must do it within ``step_timeout``. Others may take ``core_start_timeout``, as loading does."""

    def prepared(self) -> Self:
        """The verb once done for it is what takes no core: in the caller's thread, while the core takes its steps."""
        return self

    def of_replica(self, number: int) -> Self:
        """The verb as the replica of that number does it, where an engine has several."""
        return self

    def merged(self, answers: Sequence[R_co]) -> R_co:
        """The answer of an engine with several replicas, one or more, which gave ``answers``."""
        return answers[0]

    def undo(self) -> Verb[object] | None:
        """The verb that takes this one back, for replicas that did it where another failed; None where none does."""
        return None


@dataclass(frozen=True)
class CheckIdle(Verb[None]):
    """Wait for steps on their way. Raises EngineError while requests are under way."""


@dataclass(frozen=True)
class Sleep(Verb[frozenset[MemoryTag]]):
    """Give back the memory of ``tags`` and return all that sleep. With kv, weights or adapters go all cached prefixes.

    Raises EngineError while requests are under way.
    """

    tags: tuple[MemoryTag, ...]

    def merged(self, answers: Sequence[frozenset[MemoryTag]]) -> frozenset[MemoryTag]:
        """The tags of memory that sleep on any replica."""
        return frozenset[MemoryTag]().union(*answers)


@dataclass(frozen=True)
class WakeUp(Verb[frozenset[MemoryTag]]):
    """Allocate the memory of ``tags`` again, where it is given back, and return the tags whose memory still is.

    Raises CapacityError where the memory is gone, CheckpointError and EngineError where weights cannot be read.
    """

    tags: tuple[MemoryTag, ...]

    def merged(self, answers: Sequence[frozenset[MemoryTag]]) -> frozenset[MemoryTag]:
        """The tags of memory that sleep on any replica."""
        return frozenset[MemoryTag]().union(*answers)


@dataclass(frozen=True)
class UpdateWeights(Verb[frozenset[MemoryTag]]):
    """Replace the weights by those of a folder or hub id, or by tensors by name; returns what sleeps.

    Raises EngineError while requests are under way; CheckpointError: for a folder before anything has changed, for
    tensors with the weights gone; ConfigError for tensors where the core or its ranks have processes of their own.
    """

    source: str | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class MeetReplicas(Verb[None]):
    """Wait until all replicas that share experts come to this verb, and take part in their steps meanwhile.

    ``said`` tells the others what this one does: "begins Sleep", say. Raises EngineError where they do not say the
    same, or one is being closed; EngineDeadError where one is gone. Waits however long it takes.
    """

    said: str


@dataclass(frozen=True)
class CaptureTogether(Verb[None]):
    """Capture graphs again on all replicas that share experts, each of which has woken up or got its new weights."""


@dataclass(frozen=True)
class LoadAdapter(Verb[tuple[Adapter, ...]]):
    """Load the LoRA adapter in the folder ``path`` as ``name``, and return all that are loaded.

    Requests may be under way. An adapter that is loaded from there already is left as it is. Raises ConfigError where
    the engine serves no adapters, CapacityError where every slot is taken, EngineError for a name that another adapter
    has and while the engine sleeps, CheckpointError for an adapter that cannot be served. Nothing has changed then.

    ``path`` is a folder or a hub id. ``folder`` is where that lies on this machine, once it was looked up.
    """

    name: str
    path: str
    folder: str = ""

    def prepared(self) -> Self:
        """The same with its ``folder``: hub ids are downloaded. Raises CheckpointError."""
        return self if self.folder else replace(self, folder=str(resolve_adapter(self.path).absolute()))

    def undo(self) -> Verb[object] | None:
        """Unload the adapter."""
        return UnloadAdapter(self.name)


@dataclass(frozen=True)
class UnloadAdapter(Verb[tuple[Adapter, ...]]):
    """Unload the adapter ``name``, awake or asleep, and return those that are left.

    Raises RequestError where none has that name, EngineError while requests use it.
    """

    name: str


@dataclass(frozen=True)
class ResetPrefixCache(Verb[None]):
    """Forget every cached prefix. Requests that run keep their pages; prompts find what is computed from now on."""


@dataclass(frozen=True)
class ReportMemory(Verb[MemoryReport]):
    """Say who holds how much of the device's memory: all ranks' tags together, and rank 0's device."""

    def merged(self, answers: Sequence[MemoryReport]) -> MemoryReport:
        """The tags of all replicas together, and the device of the first."""
        by_tag = sum((Counter(answer.by_tag) for answer in answers), Counter[str]())
        return MemoryReport({tag: by_tag[tag] for answer in answers for tag in answer.by_tag}, answers[0].device)


@dataclass(frozen=True)
class ReadMetrics(Verb["MetricsSnapshot"]):
    """Return what the engine and its plugins counted so far, by layers on rank 0."""

    def merged(self, answers: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
        """The sums of all replicas' samples."""
        return answers[0].total_of(answers)


@dataclass(frozen=True)
class StartProfile(Verb[None]):
    """Start a profile, written into ``folder`` when it is stopped, with a range for each layer if wanted.

    Raises EngineError where one is taken already, PlatformError where the platform has no profiler.
    """

    folder: str
    layers: bool = False

    def of_replica(self, number: int) -> Self:
        """Write into a folder of its own within ``folder``."""
        return replace(self, folder=str(Path(self.folder) / f"replica_{number}"))


@dataclass(frozen=True)
class StopProfile(Verb[None]):
    """End the profile and write it. Raises EngineError where none is taken."""


class CoreControl(Protocol):
    """The interface for verbs, of a core in this process or behind a link, and of the engines in front of it."""

    def control(self, verb: Verb[R]) -> R:
        """Do ``verb`` between two steps, and return its answer; raises what the verb's docstring says."""
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
