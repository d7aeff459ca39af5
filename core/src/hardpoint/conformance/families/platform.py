"""Trials of platforms: detection without a context, honest numbers, memory, synchronisation and graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.dtypes import dtype_of
from hardpoint.plugin_host.signatures import misfit
from hardpoint_plugin_api import (
    Contribution,
    DeviceInfo,
    GraphEngine,
    HardpointError,
    MemorySnapshot,
    Platform,
    PlatformError,
    StepLimits,
)
from hardpoint_plugin_api.platform import MemoryTag

_DETECT_SECONDS = 2.0
"""The contract says milliseconds; this much is wrong on any machine."""
_DETECT_TIMEOUT = 60
_MIB = 2**20
_SUSPENDED = 64 * _MIB
"""As much as stands out from what a machine's other processes take and give back meanwhile."""

_DETECT = """
import json, os, sys, threading, time
sys.path[:] = json.loads(sys.argv[1])
from hardpoint.plugin_host import discover

def open_devices():
    folder = "/proc/self/fd"
    names = [os.path.join(folder, n) for n in os.listdir(folder)] if os.path.isdir(folder) else []
    places = {os.path.realpath(n) for n in names}
    return {p for p in places if p.startswith("/dev/") and not p.startswith(("/dev/pts", "/dev/shm"))}

plugins = discover()
offer = next(o for o in plugins.offers("platform") if [o.plugin, o.contribution.name] == json.loads(sys.argv[2]))
platform = plugins.load(offer)
devices, threads, imported = open_devices(), threading.active_count(), "torch" in sys.modules
began = time.perf_counter()
info = platform.detect()
seconds = time.perf_counter() - began
torch = sys.modules.get("torch")
kind = getattr(info, "torch_type", None)
module = getattr(torch, kind, None) if torch and kind else None
print(json.dumps({
    "seconds": seconds,
    "imported": imported,
    "imports": "torch" in sys.modules and not imported,
    "devices": sorted(open_devices() - devices),
    "threads": threading.active_count() - threads,
    "initialized": bool(getattr(module, "is_initialized", bool)()),
    "found": repr(info),
}))
"""


class PlatformTrials:
    """The generator of the family ``platform``."""

    family = "platform"

    def serves(self, contribution: Contribution) -> bool:
        """Every platform: all share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """One trial for each part of the contract, on the platform that the site has made active."""
        yield Trial("detect", (Check("detect", partial(detect, subject)),))
        for name, check in _CHECKS.items():
            yield Trial(name, (Check(name, partial(check, subject)),))
        for dtype in subject.dtypes():
            yield Trial(f"dtype/{dtype}", (Check("dtype", partial(dtype_works, subject, dtype)),))


def _platform(subject: Subject) -> Platform:
    return subject.site.platform


def detect(subject: Subject) -> Finding:
    """``detect``: in a fresh process, ``detect`` is quick and leaves no trace: no context, device file or thread."""
    offer = subject.offer
    command = [sys.executable, "-c", _DETECT, json.dumps(sys.path), json.dumps([offer.plugin, offer.contribution.name])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DETECT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Finding.failed("detect", "detect", f"did not return within {_DETECT_TIMEOUT} s")
    if done.returncode:
        return Finding.failed("detect", "detect", done.stderr.strip().rpartition("\n")[2])
    seen = json.loads(done.stdout.splitlines()[-1])
    if "DeviceInfo" not in seen["found"]:
        return Finding.failed("detect", "detect", f"found a device here before, and now {seen['found']}")
    if seen["initialized"] or seen["devices"]:
        files = ", ".join(seen["devices"]) or "torch's device module is initialised"
        return Finding.failed("device-context", "detect", f"a device context is left behind: {files}")
    if seen["imports"]:
        return Finding.failed("detect-imports", "detect", "imports torch, which takes seconds and may start a context")
    if seen["threads"]:
        return Finding.failed("thread", "detect", f"{seen['threads']} threads are left behind")
    if seen["seconds"] > _DETECT_SECONDS:
        return Finding.failed("slow", "detect", f"takes {seen['seconds']:.1f} s")
    return Finding()


def device_info(subject: Subject) -> Finding:
    """``device-info``: what is said of the device can be true, and names what it claims to be."""
    platform = _platform(subject)
    info: Any = platform.info  # whatever a plugin gives
    name = subject.offer.contribution.name
    if not isinstance(info, DeviceInfo):
        return Finding.failed("device-info", "info", f"is {info!r}")
    try:
        torch.device(info.torch_type)
        unknown = [d for d in (*info.dtypes, *([info.fp8.dtype] if info.fp8 else [])) if not dtype_of(d)]
    except (RuntimeError, HardpointError) as error:
        return Finding.failed("device-info", "info", str(error))
    wrong = {
        "platform": info.platform != name or platform.name != name,
        "name": not info.name.strip(),
        "arch": not info.arch or info.arch != info.arch.strip(),
        "count": info.count < 1,
        "memory_bytes": info.memory_bytes <= 0,
        "dtypes": not info.dtypes or bool(unknown),
        "present": not info.present,
        "numa": any(not node.cpus and not node.memory_bytes for node in info.numa),
    }
    bad = [f"{key} = {getattr(info, key)!r}" for key, is_wrong in wrong.items() if is_wrong]
    return Finding.failed("device-info", "info", "; ".join(bad)) if bad else Finding()


def activate(subject: Subject) -> Finding:
    """``activate``: gives a device of the type that was described, and refuses one that is not there."""
    platform = _platform(subject)
    device = platform.activate(0)
    if not isinstance(device, torch.device) or device.type != platform.info.torch_type:
        return Finding.failed("activate", "activate(0)", f"returned {device!r}, for type {platform.info.torch_type!r}")
    if int(torch.ones(3, device=device).sum()) != 3:
        return Finding.failed("activate", "activate(0)", "the device cannot add")
    for index in (platform.info.count, -1):
        try:
            platform.activate(index)
        except PlatformError:
            continue
        return Finding.failed("activate", f"activate({index})", "must raise PlatformError: there is no such device")
    return Finding()


def memory(subject: Subject) -> Finding:
    """``memory``: counters are plausible, and a peak covers what was allocated since it was reset."""
    platform, size = _platform(subject), 64 * _MIB
    if fault := misfit(type(platform.memory)):
        return Finding.failed("signature", "memory", fault)
    before = platform.memory.snapshot()
    if not isinstance(before, MemorySnapshot) or not 0 <= before.free <= before.total or before.peak < 0:
        return Finding.failed("memory", "snapshot", f"{before!r}")
    described = platform.info.memory_bytes
    if not described / 2 <= before.total <= described * 2:
        return Finding.failed("memory", "total", f"{before.total:,} bytes, and detection found {described:,}")
    platform.memory.reset_peak()
    block = torch.ones(size, dtype=torch.uint8, device=subject.site.device)
    platform.synchronize()
    peak = platform.memory.snapshot().peak
    del block
    if peak < size:
        return Finding.failed("memory", "peak", f"{peak:,} bytes, after {size:,} were allocated")
    platform.memory.trim()
    return Finding()


def pools(subject: Subject) -> Finding:
    """``pools``: memory can be taken under every tag; what is suspended is given back, and comes back in its place."""
    platform, device = _platform(subject), subject.site.device
    for tag in get_args(MemoryTag):
        with platform.memory.pool(tag):
            held = torch.full((_MIB,), 7, dtype=torch.uint8, device=device)
        if int(held[-1]) != 7:
            return Finding.failed("pools", tag, "memory taken under this tag does not hold what is written to it")
        if tag not in platform.memory.suspendable:
            if _accepts(platform.memory.suspend, [tag]):
                return Finding.failed("pools", tag, "suspend() accepts a tag that is not suspendable")
            continue
        if fault := _suspended(subject, tag):
            return Finding.failed("pools", tag, fault)
    return Finding()


def _suspended(subject: Subject, tag: MemoryTag) -> str | None:
    """Faults of suspending and resuming the memory allocated under ``tag``."""
    platform, device = _platform(subject), subject.site.device
    kept = torch.full((_MIB,), 9, dtype=torch.uint8, device=device)
    with platform.memory.pool(tag):
        held = torch.full((_SUSPENDED,), 7, dtype=torch.uint8, device=device)
    platform.synchronize()
    address, before = held.data_ptr(), platform.memory.snapshot().free
    platform.memory.suspend([tag])
    given_back = platform.memory.snapshot().free - before
    platform.memory.resume([tag])
    not_taken = platform.memory.snapshot().free - before
    if given_back < _SUSPENDED:
        return f"suspend() gives back {given_back:,} of {_SUSPENDED:,} bytes"
    if not_taken >= _SUSPENDED:
        return f"resume() does not take the {_SUSPENDED:,} bytes again"
    held.fill_(5)
    platform.synchronize()
    if held.data_ptr() != address or not bool((held == 5).all()):
        return "memory is not usable at its address after suspend and resume"
    return None if bool((kept == 9).all()) else "memory that was not taken under this tag has lost its content"


def _accepts(function: Callable[..., object], *args: object) -> bool:
    try:
        function(*args)
    except PlatformError:
        return False
    return True


def synchronize(subject: Subject) -> Finding:
    """``synchronize``: returns, and what was submitted before is done."""
    platform, device = _platform(subject), subject.site.device
    x = torch.eye(512, device=device)
    for _ in range(20):
        x = x @ x
    platform.synchronize()
    return Finding() if float(x.trace()) == 512.0 else Finding.failed("synchronize", "a product", "is wrong")


def step_limits(subject: Subject) -> Finding:
    """``step-limits``: limits, defaults and budgets are of the contract's types and can be kept."""
    platform = _platform(subject)
    limits = platform.step_limits()
    if not isinstance(limits, StepLimits) or limits.intersect(StepLimits()) != limits:
        return Finding.failed("step-limits", "step_limits", f"{limits!r}")
    numbers = [n for n in (limits.max_tokens, limits.max_requests, limits.max_context) if n is not None]
    if min([*numbers, limits.chunk_multiple, *limits.token_buckets], default=1) < 1:
        return Finding.failed("step-limits", "step_limits", f"a limit below one: {limits!r}")
    if list(limits.token_buckets) != sorted(set(limits.token_buckets)):
        return Finding.failed("step-limits", "token_buckets", f"do not ascend: {limits.token_buckets}")
    if platform.default_block_size() < 1:
        return Finding.failed("step-limits", "default_block_size", str(platform.default_block_size()))
    budget, total = platform.kv_cache_budget(), platform.memory.snapshot().total
    if not 0 < budget <= total:
        return Finding.failed("step-limits", "kv_cache_budget", f"{budget:,} of {total:,} bytes")
    for stored in ("float32", "float16", "bfloat16", "float64"):
        chosen = platform.default_dtype(stored)
        if chosen not in platform.info.dtypes:
            return Finding.failed("step-limits", "default_dtype", f"{chosen!r} for {stored!r} is not among its dtypes")
    return Finding()


def graph_engine(subject: Subject) -> Finding:
    """``graph-engine``: what was prepared gives on fresh inputs what the function gives, two graphs in turn."""
    platform, device = _platform(subject), subject.site.device
    engine = platform.graph_engine()
    declared = {f: getattr(engine, f, None) for f in ("bytes_per_graph", "max_graphs")}
    if isinstance(engine, GraphEngine) and (fault := misfit(type(engine))):
        return Finding.failed("signature", "graph_engine", fault)
    if not isinstance(engine, GraphEngine) or (declared["max_graphs"] or 0) < 0:
        return Finding.failed("graph-engine", "graph_engine", f"{engine!r}, {declared}")

    def step(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_((x @ y).relu() + x.sum())
        return out

    def draw(seed: int, size: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: torch.randn(size, size, generator=generator).to(device) for name in ("x", "y")}
        return drawn | {"out": torch.empty(size, size, device=device)}

    with torch.inference_mode():
        buffers = {size: draw(0, size) for size in (8, 24)}
        step(**buffers[8])
        ready = {size: engine.prepare(f"size {size}", step, held) for size, held in buffers.items()}
        for seed, size in ((1, 8), (2, 24), (3, 8), (4, 24)):
            fresh = draw(seed, size)
            for name in ("x", "y"):
                buffers[size][name].copy_(fresh[name])
            buffers[size]["out"].fill_(float("nan"))
            got, wanted = ready[size].run(), step(**fresh)
            platform.synchronize()
            if not torch.equal(got, wanted):
                return Finding.failed("graph-engine", f"run {seed}", "gives something else than the function itself")
    return Finding()


def graph_pieces(subject: Subject) -> Finding:
    """``graph-pieces``: what interrupts a function is called by each run, may wait for the device, and may differ."""
    platform, device = _platform(subject), subject.site.device
    engine = platform.graph_engine()
    if not engine.piece_sizes:
        return Finding.not_claimed("no-pieces", "the graph engine lists no piece_sizes")
    factor = [1.0]

    def step(x: torch.Tensor) -> torch.Tensor:
        before = x + 1
        between = torch.empty_like(before)

        def call() -> None:
            between.copy_(torch.tensor([value * factor[0] for value in before.tolist()]))

        engine.interrupt(call)
        return between - 1

    with torch.inference_mode():
        x = torch.zeros(4, device=device)
        prepared = engine.prepare("pieces", step, {"x": x})
        for number in (2.0, 3.0, 5.0):
            x.fill_(number)
            factor[0] = -number
            got, wanted = prepared.run().tolist(), [(number + 1) * -number - 1] * 4
            if got != wanted:
                return Finding.failed("graph-pieces", f"run with {number:g}", f"gives {got}, not {wanted}")
    return Finding()


def pin(subject: Subject) -> Finding:
    """``pin``: returns host memory with the same content, which can be copied to the device."""
    x = torch.arange(1000)
    pinned = _platform(subject).pin(x)
    if pinned.device.type != "cpu" or not torch.equal(pinned, x):
        return Finding.failed("pin", "pin", f"returned {pinned.shape} on {pinned.device}")
    moved = pinned.to(subject.site.device, non_blocking=True)
    _platform(subject).synchronize()
    return Finding() if torch.equal(moved.cpu(), x) else Finding.failed("pin", "a copy", "arrived changed")


def ranges(subject: Subject) -> Finding:
    """``range``: a marked range runs what is inside it."""
    with _platform(subject).range("conformance"):
        done = int(torch.ones(2, device=subject.site.device).sum())
    return Finding() if done == 2 else Finding.failed("range", "range", "did not run its body")


def dtype_works(subject: Subject, dtype: str) -> Finding:
    """``dtype``: a claimed dtype holds numbers, adds and multiplies matrices as the host does."""
    device, kind = subject.site.device, dtype_of(dtype)
    if not kind.is_floating_point:
        x = torch.arange(10, dtype=kind)
        same = torch.equal((x.to(device) + 1).cpu(), x + 1)
        return Finding(compared=x.numel()) if same else Finding.failed("dtype", dtype, "adds wrongly")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(48, 48, generator=generator).to(kind) for _ in range(2))
    if kind.itemsize == 1:
        same = torch.equal(a.to(device).float().cpu(), a.float())
        return Finding(compared=a.numel()) if same else Finding.failed("dtype", dtype, "does not keep numbers")
    got, wanted = (a.to(device) @ b.to(device) + a.to(device)).cpu().double(), a.double() @ b.double() + a.double()
    limit = 8 * torch.finfo(kind).eps * float(wanted.abs().max())
    error = float((got - wanted).abs().max())
    if not error <= limit:
        return Finding.failed("dtype", dtype, f"a product is {error:.3g} off, {limit:.3g} allowed")
    return Finding(measured={"peak": (error, limit)}, compared=wanted.numel())


_CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "device-info": device_info,
    "activate": activate,
    "memory": memory,
    "pools": pools,
    "synchronize": synchronize,
    "step-limits": step_limits,
    "graph-engine": graph_engine,
    "graph-pieces": graph_pieces,
    "pin": pin,
    "range": ranges,
}
