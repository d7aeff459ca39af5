"""Faults planted in a platform: each is caught, by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.platform import PlatformTrials
from hardpoint.conformance.site import Site
from hardpoint_cpu.platform import CpuMemory, CpuPlatform
from hardpoint_plugin_api import EagerGraphEngine, GraphEngine, MemorySnapshot, StepLimits
from tests.conformance.trying import Caught, first_failure, subject


class NoSuchDevice(CpuPlatform):
    """Accepts any index."""

    def activate(self, index: int) -> torch.device:
        return super().activate(0)


class WrongType(CpuPlatform):
    def activate(self, index: int) -> torch.device:
        super().activate(index)
        return torch.device("meta")


class MoreFreeThanThereIs(CpuMemory):
    def snapshot(self) -> MemorySnapshot:
        found = super().snapshot()
        return MemorySnapshot(found.total * 2, found.total, found.peak)


class PeakStandsStill(CpuMemory):
    def snapshot(self) -> MemorySnapshot:
        found = super().snapshot()
        return MemorySnapshot(found.free, found.total, 0)


class Overcommits(CpuPlatform):
    def kv_cache_budget(self) -> int:
        return self.memory.snapshot().total * 2


class BadBuckets(CpuPlatform):
    def step_limits(self) -> StepLimits:
        return StepLimits(token_buckets=(8, 4))


class RunsWhatWasRecorded(GraphEngine):
    """Runs the function once and gives its first result for ever."""

    def prepare(self, key: Any, fn: Callable[..., Any], inputs: Any) -> Any:
        return _Recorded(fn(**inputs).clone())


class TakesNoInputs(GraphEngine):
    def prepare(self, key: Any, fn: Callable[..., Any]) -> Any:  # type: ignore[override]  # that is the fault
        raise AssertionError("it is seen before it is called")


class WithoutInputs(CpuPlatform):
    def graph_engine(self) -> GraphEngine:
        return TakesNoInputs()


class _Recorded:
    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def run(self, update: Any = None) -> torch.Tensor:
        return self.result


class RecordsResults(CpuPlatform):
    def graph_engine(self) -> GraphEngine:
        return RunsWhatWasRecorded()


class CallsOnceAlone(GraphEngine):
    """Forgets what interrupts a function, once it is prepared."""

    piece_sizes = (8,)
    _prepared = False

    def interrupt(self, call: Callable[[], None]) -> None:
        if not self._prepared:
            call()

    def prepare(self, key: Any, fn: Callable[..., Any], inputs: Any) -> Any:
        fn(**inputs)
        self._prepared = True
        return EagerGraphEngine().prepare(key, fn, inputs)


class ForgetsInterruptions(CpuPlatform):
    def graph_engine(self) -> GraphEngine:
        return CallsOnceAlone()


class PinLosesContent(CpuPlatform):
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)


class RangeThatRaises(CpuPlatform):
    def range(self, name: str) -> AbstractContextManager[None]:
        raise RuntimeError("no profiler here")


def with_memory(memory: type[CpuMemory]) -> Callable[[Site], CpuPlatform]:
    def make(site: Site) -> CpuPlatform:
        platform = CpuPlatform(site.platform.info)
        platform._memory = memory()
        return platform

    return make


def of(kind: type[CpuPlatform]) -> Callable[[Site], CpuPlatform]:
    return lambda site: kind(site.platform.info)


def described(**changes: Any) -> Callable[[Site], CpuPlatform]:
    return lambda site: CpuPlatform(replace(site.platform.info, **changes))


PLANTED: dict[str, tuple[Callable[[Site], CpuPlatform], str]] = {
    "accepts any device": (of(NoSuchDevice), "activate"),
    "gives another device": (of(WrongType), "activate"),
    "more free than there is": (with_memory(MoreFreeThanThereIs), "memory"),
    "a peak that stands still": (with_memory(PeakStandsStill), "memory"),
    "a cache larger than memory": (of(Overcommits), "step-limits"),
    "buckets descend": (of(BadBuckets), "step-limits"),
    "results recorded": (of(RecordsResults), "graph-engine"),
    "prepare takes no inputs": (of(WithoutInputs), "graph-engine"),
    "interruptions forgotten": (of(ForgetsInterruptions), "graph-pieces"),
    "pin loses content": (of(PinLosesContent), "pin"),
    "range raises": (of(RangeThatRaises), "range"),
    "no memory described": (described(memory_bytes=0), "device-info"),
    "another platform's name": (described(platform="other"), "device-info"),
}


def tried(site: Site, make: Callable[[Site], CpuPlatform], cases: str) -> Caught | None:
    platform = make(site)
    platform.threads = 1
    there = replace(site, platform=platform)
    return first_failure(subject(there, type(platform), "platform", name="cpu"), PlatformTrials(), cases)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    make, check = PLANTED[title]
    caught = tried(site, make, "[!d]*" if check != "device-info" else "device-info")
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


def test_a_healthy_platform_passes(site: Site) -> None:
    caught = tried(site, of(CpuPlatform), "*")
    assert caught is None, str(caught)
