"""The ranks' handlers of control verbs, and the verbs that the core alone asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from hardpoint.checkpoint.source import resolve_model
from hardpoint.engine.control import (
    CaptureTogether,
    MemoryReport,
    ReadMetrics,
    ReportMemory,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    Verb,
    WakeUp,
)
from hardpoint.engine.lora import Adapter
from hardpoint_plugin_api import CheckpointError, MemoryTag

if TYPE_CHECKING:
    from hardpoint.engine.execution.routed_experts import HeldTokens, Routed
    from hardpoint.engine.execution.weights import Tensors
    from hardpoint.engine.execution.worker import Worker
    from hardpoint.metrics import MetricsSnapshot


@dataclass(frozen=True)
class Synchronize(Verb[None]):
    """Wait for the device, which may be at a step that nobody waits for."""


@dataclass(frozen=True)
class ListAsleep(Verb[frozenset[MemoryTag]]):
    """Return the tags whose memory was given back."""


@dataclass(frozen=True)
class CheckWeights(Verb[None]):
    """Raise CheckpointError for weights that UpdateWeights could not take from ``source``; changes nothing."""

    source: str


@dataclass(frozen=True)
class CheckAdapter(Verb[None]):
    """Raise CheckpointError for an adapter that FillSlot could not read; changes nothing."""

    adapter: Adapter


@dataclass(frozen=True)
class FillSlot(Verb[None]):
    """Read an adapter into its slot."""

    adapter: Adapter


@dataclass(frozen=True)
class EmptySlot(Verb[None]):
    """Fill an adapter's slot with zeros."""

    slot: int


@dataclass(frozen=True)
class CaptureNext(Verb[int]):
    """Capture a graph that the start left out, if ``least_missed`` steps missed it. Returns how many are left."""

    takes_a_step: ClassVar[bool] = True
    least_missed: int = 0


@dataclass(frozen=True)
class ReadRoutedExperts(Verb["list[Routed | None]"]):
    """Return the routed experts of sequences that ended, as this rank's layers recorded them; see Routed."""

    held: tuple[HeldTokens, ...]


@singledispatch
def on_rank(verb: Verb[Any], worker: Worker) -> Any:
    """Do ``verb`` on one rank and return its answer. Raises NotImplementedError for a verb without a handler."""
    raise NotImplementedError(f"ranks have no handler of the verb {type(verb).__name__}")


@on_rank.register(Synchronize)
def synchronize(verb: Synchronize, worker: Worker) -> None:
    """Wait for the device."""
    with torch.inference_mode():
        worker.blueprint.platform.synchronize()


@on_rank.register(ListAsleep)
def list_asleep(verb: ListAsleep, worker: Worker) -> frozenset[MemoryTag]:
    """Ask what is held."""
    return worker.holdings.asleep


@on_rank.register(CheckWeights)
def check_weights(verb: CheckWeights, worker: Worker) -> None:
    """Read the folder's config and the headers of its files."""
    worker.weights.check(_location(verb.source, worker))


@on_rank.register(Sleep)
def sleep(verb: Sleep, worker: Worker) -> frozenset[MemoryTag]:
    """Drop captured graphs, too: what they read moves."""
    synchronize(Synchronize(), worker)
    worker.graphs.drop()
    worker.holdings.sleep(verb.tags)
    return worker.holdings.asleep


@on_rank.register(WakeUp)
def wake_up(verb: WakeUp, worker: Worker) -> frozenset[MemoryTag]:
    """Capture again what is captured ahead."""
    worker.holdings.wake_up(verb.tags)
    _prepare_again(worker)
    return worker.holdings.asleep


@on_rank.register(UpdateWeights)
def update_weights(verb: UpdateWeights, worker: Worker) -> frozenset[MemoryTag]:
    """Fill the same slots. A folder was checked before."""
    source = verb.source
    folder = _location(source, worker) if isinstance(source, str) else None
    worker.graphs.drop()
    try:
        with worker.holdings.filling("weights"):
            worker.weights.update(folder if folder is not None else cast("Tensors", source))
    except CheckpointError as error:
        waking = ", or let it wake up" if worker.weights.can_restore else ""
        raise CheckpointError(f"{error}; the engine holds no weights now: update them again{waking}") from error
    _prepare_again(worker)
    return worker.holdings.asleep


@on_rank.register(CheckAdapter)
def check_adapter(verb: CheckAdapter, worker: Worker) -> None:
    """Read the adapter's config and the headers of its file."""
    worker.adapters.check(verb.adapter)


@on_rank.register(FillSlot)
def fill_slot(verb: FillSlot, worker: Worker) -> None:
    """Wait for the device first: the steps in flight may read the slot."""
    synchronize(Synchronize(), worker)
    worker.adapters.load(verb.adapter)


@on_rank.register(EmptySlot)
def empty_slot(verb: EmptySlot, worker: Worker) -> None:
    """Wait for the device first: the steps in flight may read the slot."""
    synchronize(Synchronize(), worker)
    worker.adapters.unload(verb.slot)


@on_rank.register(CaptureNext)
def capture_next(verb: CaptureNext, worker: Worker) -> int:
    """Every rank of a stage captures the same."""
    return worker.graphs.capture_next(verb.least_missed)


@on_rank.register(CaptureTogether)
def capture_together(verb: CaptureTogether, worker: Worker) -> None:
    """All ranks of all replicas do it at the same time."""
    worker.graphs.prepare_ahead()
    worker.blueprint.platform.memory.trim()  # what steps took only to be prepared


@on_rank.register(ReadRoutedExperts)
def read_routed_experts(verb: ReadRoutedExperts, worker: Worker) -> list[Routed | None]:
    """Return the routed experts of each sequence, read from the pages that it held."""
    with torch.inference_mode():
        return [worker.routed_experts.read(held) for held in verb.held]


@on_rank.register(ReportMemory)
def report_memory(verb: ReportMemory, worker: Worker) -> MemoryReport:
    """Report this rank's memory."""
    return worker.holdings.memory.report()


@on_rank.register(ReadMetrics)
def read_metrics(verb: ReadMetrics, worker: Worker) -> MetricsSnapshot:
    """Report what this rank counted."""
    return worker.blueprint.ctx.engine_metrics.snapshot()


@on_rank.register(StartProfile)
def start_profile(verb: StartProfile, worker: Worker) -> None:
    """Start the platform's profiler."""
    blueprint = worker.blueprint
    blueprint.ctx.profiler.start(Path(verb.folder), blueprint.model if verb.layers else None)


@on_rank.register(StopProfile)
def stop_profile(verb: StopProfile, worker: Worker) -> None:
    """End the profile and write it."""
    worker.blueprint.ctx.profiler.stop()


def _location(source: str, worker: Worker) -> Path:
    """The folder or file of new weights, in the format that the engine reads."""
    config = worker.blueprint.config
    return resolve_model(source, download_dir=config.download_dir, form=config.checkpoint_format)


def _prepare_again(worker: Worker) -> None:
    """Capture, unless other replicas must do so, too, which may have failed to come so far: see CaptureTogether."""
    if not (worker.holdings.asleep or worker.blueprint.config.topology.shares_experts):
        capture_together(CaptureTogether(), worker)
