"""May the kernel be recorded with a step, and run without the host?"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.profiler import profile

from hardpoint.conformance.memory import equal_bits, poison
from hardpoint.conformance.probe import Chained, Probe, refill, run
from hardpoint.conformance.site import Site
from hardpoint.conformance.trials import Finding
from hardpoint.kernel_calls import KernelCalls
from hardpoint.ops.judge import Call, judge_call
from hardpoint_plugin_api import Reason

_WARM_UP = 2
_RUNS = 4
_CHAINS = 8


def replay(probe: Probe, seed: int) -> Finding:
    """``replay``: prepared by the platform's graph engine, the kernel gives right results on fresh inputs."""
    if reason := probe.not_recorded():
        return Finding.not_claimed("not-recorded", reason)
    call = probe.call(seed)
    for _ in range(_WARM_UP):
        refill(call, probe.call(seed))
        run(call)
    refill(call, probe.call(seed))
    with torch.inference_mode():
        call.before()
        token = call.plan()
        engine = probe.subject.site.platform.graph_engine()
        inputs = {i.label: i.tensor for i in call.inputs}
        # As in an engine: a kernel that the graph engine cannot see is called again by each run.
        calls, offer = KernelCalls(probe.subject.site.home), probe.subject.offer
        run_kernel = calls.wrap(offer, probe.subject.target, call.run)
        graph = calls.prepare(engine, "conformance", lambda **_: run_kernel(), inputs)
    for number in range(2):
        other = probe.call(seed + number)
        if not refill(call, other):
            return Finding.not_claimed("shapes-vary", "this case draws other shapes for each seed")
        with torch.inference_mode():
            replanned = call.plan()
        if replanned != token:
            return Finding.not_claimed("token", "the plan of fresh inputs asks for another recording")
        finding = Finding.of(judge_call(replace(call, expect=other.expect), graph.run))
        if finding.faults:
            return finding
    return Finding()


def host_sync(probe: Probe, seed: int) -> Finding:
    """``host-sync``: the kernel does not make the host wait for the device, where steps are recorded."""
    if reason := probe.not_recorded():
        return Finding.not_claimed("not-recorded", reason)
    site = probe.subject.site
    if not site.records_graphs:
        return Finding.not_claimed("nothing-recorded", f"platform {site.platform.name} records no steps")
    switch: Any = getattr(_device_module(site.device), "set_sync_debug_mode", None)
    if switch is None:
        return Finding.not_claimed("cannot-tell", f"{site.device.type} cannot tell when the host waits")
    call = probe.call(seed)
    run(call)
    with torch.inference_mode():
        call.plan()
    site.platform.synchronize()
    switch("error")
    try:
        with torch.inference_mode():
            call.run()
    except RuntimeError as error:
        return Finding.failed("host-sync", "the call", str(error).partition("\n")[0])
    finally:
        switch("default")
    return Finding()


def chain(probe: Probe, seed: int) -> Finding:
    """``chain``: begun before what came before it has ended, the kernel still reads nothing before it is written.

    Several run in a row, each on what the last one wrote, as the platform's graph engine prepares them. From the second
    such run on, memory for results is full of poison before. Each gives the bits that it gives when all before it has
    ended.
    """
    if not isinstance(probe, Chained):
        return Finding.failed(
            "overlapped", "the target", "overlapped = True is for families that can be tried in chains"
        )
    links = probe.links()
    if isinstance(links, Reason):
        return Finding(unsupported=links)
    platform, x = probe.subject.site.platform, probe.call(seed).inputs[0].tensor

    def one_after_another(x: torch.Tensor, wait: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        results = []
        for link in (*links, *links):
            x = link(x)
            wait()
            results.append(x)
        return results

    with torch.inference_mode():
        wanted = one_after_another(x, platform.synchronize)
        graph = platform.graph_engine().prepare("conformance", one_after_another, {"x": x})
        for number in range(_CHAINS):
            results = graph.run()
            platform.synchronize()
            for link, (got, right) in enumerate(zip(results, wanted, strict=True)):
                if not equal_bits(got, right):
                    message = f"run {number + 1} has other bits than a run in which each waits for the one before"
                    return Finding.failed("too-early", f"link {link + 1} of {len(wanted)}", message)
            poison(results)
    return Finding()


def allocation(probe: Probe, seed: int) -> Finding:
    """``allocation``: memory does not grow from call to call; where addresses are recorded, none is taken at all.

    That is read off a device's peak. The host's is no witness: pages come and go there with all else in the process.
    """
    call, site = probe.call(seed), probe.subject.site
    for _ in range(_WARM_UP):
        run(call)
    _taken(call, 1, site)  # from here on the profiler knows the size of what stands between calls, such as a plan
    grown = _taken(call, _RUNS, site)
    if grown > 0:
        return Finding.failed("memory-growth", "the call", f"{grown:,} bytes more are held after {_RUNS} calls")
    if probe.allocates or not site.records_graphs or probe.not_recorded() or site.device.type == "cpu":
        return Finding()
    memory = site.platform.memory
    memory.reset_peak()
    before = memory.snapshot().peak
    with torch.inference_mode():
        call.run()
    site.platform.synchronize()
    taken = memory.snapshot().peak - before
    if taken > 0:
        return Finding.failed("allocates", "the call", f"{taken:,} bytes were taken by a call after warm-up")
    return Finding()


def _taken(call: Call, calls: int, site: Site) -> int:
    """Bytes that are held after ``calls`` and were not before, by torch's profiler, and by the device's own count."""
    before = _held(site)
    # Not torch.profiler, whose start imports torch's compiler: that takes two seconds.
    with torch.inference_mode(), profile(use_kineto=True, profile_memory=True) as profiled:
        for _ in range(calls):
            call.plan()
            outputs = call.run()
            del outputs
        site.platform.synchronize()  # what a copy under way reads from is held until then
        gc.collect(1)  # what a call leaves in cycles is young; a full collection would cost more than the check
    # The raw events: building the profiler's own tables of them takes seconds where a kernel calls many operators.
    raw: Any = profiled.kineto_results
    profiled_bytes = sum(event.nbytes() for event in raw.events() if event.name() == "[memory]")
    return max(int(profiled_bytes), _held(site) - before)


def _held(site: Site) -> int:
    """A device's memory that this process holds: a peak that was just reset. The host's includes others' and is 0.

    Not every device's allocator reports to the profiler.
    """
    if site.device.type == "cpu":
        return 0
    site.platform.memory.reset_peak()
    return site.platform.memory.snapshot().peak


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)
