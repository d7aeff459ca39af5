"""Faults that only an accelerator shows, planted on the simulated one: each is caught, by the check that should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast, get_args

import pytest
import torch

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.families.platform import PlatformTrials
from hardpoint.conformance.generators import Generator
from hardpoint.conformance.site import Site, Subject
from hardpoint.plugin_host import discover
from hardpoint_plugin_api.platform import MemoryTag
from hardpoint_sim.attention import SimAttention
from hardpoint_sim.norm import rms_norm_out
from hardpoint_sim.platform import SimMemory, SimPlatform
from tests.conformance.trying import EveryCheck, first_failure, subject

Tensor = torch.Tensor
Kernel = Callable[..., None]


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "sim")


def failures(tried: Subject, generator: Generator, case: str) -> dict[str, set[str]]:
    """Checks of the first case that matches and has some that fail -> codes of their faults."""
    for trial in generator.trials(tried, EveryCheck()):
        if fnmatchcase(trial.case, case):
            found = {check: {f.code for f in finding.faults} for check, finding in trial.run() if finding.faults}
            if found:
                return found
    return {}


# Kernels.


def waits_for_the_host(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    if float(x.sum().cpu()) != 12345:
        rms_norm_out(x, weight, out, eps=eps)


def leaves_its_stream_behind(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    """Its stream waits as it should, and stays the current one."""
    ours, before = torch.Stream(x.device), torch.accelerator.current_stream()
    ours.wait_stream(before)
    torch.accelerator.set_stream(ours)
    rms_norm_out(x, weight, out, eps=eps)


def works_on_a_stream_that_nobody_joins(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    ours, before = torch.Stream(x.device), torch.accelerator.current_stream()
    ours.wait_stream(before)
    torch.accelerator.set_stream(ours)
    rms_norm_out(x, weight, out, eps=eps)
    torch.accelerator.set_stream(before)


class RecordsAnOldAddress:
    """While a step is recorded, takes its input from a copy that was made for the last call."""

    def __init__(self) -> None:
        self.last: dict[torch.Size, Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
        if torch.accelerator.current_stream().is_capturing() and x.shape in self.last:
            x = self.last[x.shape]
        else:
            self.last[x.shape] = x.clone()
        rms_norm_out(x, weight, out, eps=eps)


class Grows:
    """Keeps something of every call."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
        rms_norm_out(x, weight, out, eps=eps)
        self.kept.append(out.clone())


KERNELS: dict[str, tuple[Callable[[], Kernel], dict[str, str]]] = {
    "the host waits": (lambda: waits_for_the_host, {"host-sync": "host-sync", "replay": "exception"}),
    "a stream is left behind": (lambda: leaves_its_stream_behind, {"streams": "stream"}),
    # The device itself objects where memory is read that another stream writes.
    "a stream is not joined": (lambda: works_on_a_stream_that_nobody_joins, {"values": "exception"}),
    "a stale address is recorded": (RecordsAnOldAddress, {"replay": "direction"}),
    "memory grows": (Grows, {"allocation": "memory-growth"}),
}
"""Faults to plant, and the checks that must object, with one of their codes."""


@pytest.fixture(autouse=True)
def default_stream() -> Iterator[None]:
    before = torch.accelerator.current_stream()
    yield
    torch.accelerator.synchronize()
    torch.accelerator.set_stream(before)


@pytest.mark.parametrize("title", KERNELS)
def test_a_fault_in_a_kernel(site: Site, title: str) -> None:
    make, wanted = KERNELS[title]
    tried = subject(site, make(), "op", "rms_norm", "sim_rms_norm", requires=[{"dtype": ["float32"]}])
    found = failures(tried, OpTrials(), "float32/random")
    assert found.keys() == wanted.keys(), f"{title}: {found}"
    assert all(code in found[check] for check, code in wanted.items()), f"{title}: {found}"


def test_a_healthy_kernel(site: Site) -> None:
    tried = subject(site, rms_norm_out, "op", "rms_norm", "sim_rms_norm", requires=[{"dtype": ["float32"]}])
    assert failures(tried, OpTrials(), "float32/random") == {}


# Attention.


def test_allocation_in_a_step(site: Site) -> None:
    """The device's own backend takes memory in ``forward``, which the contract forbids, and is right in all else."""
    claims = [{"dtype": ["float32"]}, {"kv_dtype": ["float32"]}, {"head_size": [16]}, {"block_size": [16]}]
    tried = subject(site, SimAttention, "attention", name="sim_columns", requires=claims)
    assert failures(tried, AttentionTrials(), "float32/kv-float32/*/decode/*") == {"allocation": {"allocates"}}


# Platforms.


class KeepsSuspended(SimMemory):
    """Says that it has suspended, and gives nothing back."""

    def suspend(self, tags: Sequence[MemoryTag]) -> None:
        pass

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        pass


EVERYTHING = cast("tuple[MemoryTag, ...]", (*get_args(MemoryTag), "other"))
"""The device counts what no tag was given for as well."""


class SuspendsEverything(SimMemory):
    def suspend(self, tags: Sequence[MemoryTag]) -> None:
        super().suspend(EVERYTHING)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        super().resume(EVERYTHING)


class NeverResumes(SimMemory):
    def resume(self, tags: Sequence[MemoryTag]) -> None:
        pass


@pytest.mark.parametrize("memory", [KeepsSuspended, SuspendsEverything, NeverResumes])
def test_a_fault_in_suspending(site: Site, memory: type[SimMemory]) -> None:
    platform = SimPlatform(site.platform.info)
    platform.activate(0)
    platform._memory = memory(platform.device_module(), 0)
    there = replace(site, platform=platform)
    caught = first_failure(subject(there, SimPlatform, "platform", name="sim"), PlatformTrials(), "pools")
    assert caught, f"{memory} was not caught"
    assert (caught.check, caught.codes) == ("pools", {"pools"})


def test_a_healthy_platform(site: Site) -> None:
    caught = first_failure(subject(site, SimPlatform, "platform", name="sim"), PlatformTrials(), "[!d]*")
    assert caught is None, str(caught)
