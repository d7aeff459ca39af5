"""The core's handlers of control verbs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from hardpoint.engine.control import (
    CaptureTogether,
    CheckIdle,
    LoadAdapter,
    MeetReplicas,
    MemoryReport,
    ReadMetrics,
    ReportMemory,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    Verb,
    WakeUp,
)
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.engine.execution.rank_verbs import CheckAdapter, CheckWeights, EmptySlot, FillSlot, ListAsleep
from hardpoint.engine.lora import Adapter
from hardpoint.metrics import MetricsSnapshot
from hardpoint_plugin_api import CheckpointError, ConfigError, EngineError, MemoryTag

if TYPE_CHECKING:
    from hardpoint.engine.core import EngineCore


_PREFIXES_NEED: frozenset[MemoryTag] = frozenset({"kv", "weights", "adapters"})
"""The memory that cached prefixes lie in, and that they were computed from."""


@singledispatch
def on_core(verb: Verb[Any], core: EngineCore) -> Any:
    """Do ``verb`` and return its answer. Raises NotImplementedError for a verb without a handler."""
    raise NotImplementedError(f"the core has no handler of the verb {type(verb).__name__}")


@on_core.register(CheckIdle)
def check_idle(verb: CheckIdle, core: EngineCore) -> None:
    """Ask the scheduler."""
    core.check_idle("put to sleep, or given other weights,")


@on_core.register(Sleep)
def sleep(verb: Sleep, core: EngineCore) -> frozenset[MemoryTag]:
    """Forget cached prefixes before their pages go, which may be gone where a rank fails, and before weights go, which
    may be others when they are read again."""
    core.check_idle("put to sleep")
    if not _PREFIXES_NEED.isdisjoint(verb.tags):
        core.scheduler.cache.pool.forget()
    return _on_ranks(verb, core)


@on_core.register(WakeUp)
def wake_up(verb: WakeUp, core: EngineCore) -> frozenset[MemoryTag]:
    """Have the ranks take memory again."""
    return _on_ranks(verb, core)


@on_core.register(UpdateWeights)
def update_weights(verb: UpdateWeights, core: EngineCore) -> frozenset[MemoryTag]:
    """Check a folder on every rank before any of them changes."""
    core.check_idle("given other weights")
    if not isinstance(verb.source, str | Iterable) or isinstance(verb.source, Mapping):
        kind = type(verb.source).__name__
        raise ConfigError(f"weights are the path of a folder, or pairs of a name and a tensor, got {kind}")
    if isinstance(verb.source, str):
        core.executor.control(CheckWeights(verb.source))
    elif not isinstance(core.executor, InProcessExecutor):
        raise ConfigError("tensors do not travel to ranks that run elsewhere; save them to a folder and give that")
    core.scheduler.cache.pool.forget()
    return _on_ranks(verb, core)


@on_core.register(LoadAdapter)
def load_adapter(verb: LoadAdapter, core: EngineCore) -> tuple[Adapter, ...]:
    """Check the adapter on every rank before any of them changes."""
    core.admission.check_awake()
    if any((adapter.name, adapter.path) == (verb.name, verb.path) for adapter in core.adapters):
        return core.admission.adapters
    adapter = core.adapters.assign(verb.name, verb.path, verb.folder)
    core.executor.control(CheckAdapter(adapter))
    try:
        core.executor.control(FillSlot(adapter))
    except CheckpointError:  # of numbers that one rank has read: others have filled theirs
        core.executor.control(EmptySlot(adapter.slot))
        raise
    core.adapters.add(adapter)
    core.admission.adapters = tuple(core.adapters)
    return core.admission.adapters


@on_core.register(UnloadAdapter)
def unload_adapter(verb: UnloadAdapter, core: EngineCore) -> tuple[Adapter, ...]:
    """Steps in flight may use the slot still; they come before the ranks empty it.

    It works asleep: an adapter whose files are gone would keep the engine from waking up.
    """
    adapter = core.adapters.find(verb.name)
    if num_users := sum(request.adapter == adapter for request in core.scheduler.unfinished):
        raise EngineError(
            f"adapter {verb.name!r} serves {num_users} requests; unload it when they have ended or been aborted"
        )
    core.executor.control(EmptySlot(adapter.slot))
    core.adapters.remove(adapter)
    core.admission.adapters = tuple(core.adapters)
    return core.admission.adapters


@on_core.register(ResetPrefixCache)
def reset_prefix_cache(verb: ResetPrefixCache, core: EngineCore) -> None:
    """Forget what every page holds."""
    core.scheduler.cache.pool.forget()


@on_core.register(ReportMemory)
def report_memory(verb: ReportMemory, core: EngineCore) -> MemoryReport:
    """Add up the ranks' tags."""
    reports = core.executor.control(verb)
    by_tag = {tag: sum(report.by_tag[tag] for report in reports) for tag in reports[0].by_tag}
    return MemoryReport(by_tag, reports[0].device)


@on_core.register(ReadMetrics)
def read_metrics(verb: ReadMetrics, core: EngineCore) -> MetricsSnapshot:
    """Join what the core counted, and the first rank of each stage: the ranks of a stage count alike."""
    ranks = core.executor.control(verb)
    stages = [ranks[rank] for rank in core.blueprint.config.topology.first_ranks]
    counted = stages[0] if len(stages) == 1 else MetricsSnapshot.of_stages(stages)
    return core.blueprint.ctx.engine_metrics.snapshot().with_those_of(counted)


@on_core.register(MeetReplicas)
def meet_replicas(verb: MeetReplicas, core: EngineCore) -> None:
    """The executor meets them: see LockStepExecutor."""
    core.executor.control(verb)


@on_core.register(CaptureTogether)
def capture_together(verb: CaptureTogether, core: EngineCore) -> None:
    """Have the ranks capture."""
    core.executor.control(verb)


@on_core.register(StartProfile)
@on_core.register(StopProfile)
def profile(verb: StartProfile | StopProfile, core: EngineCore) -> None:
    """Start or stop the profile on every rank."""
    core.executor.control(verb)


def _on_ranks(verb: Verb[frozenset[MemoryTag]], core: EngineCore) -> frozenset[MemoryTag]:
    """Have the ranks do ``verb``, and note what sleeps then on any of them, whatever becomes of it."""
    try:
        core.executor.control(verb)
    finally:
        asleep = core.executor.control(ListAsleep())
        core.admission.asleep = frozenset(tag for tags in asleep for tag in tags)
        core.captures.again()
    return core.admission.asleep
