"""Is all work done, and everything that was started ended, when the kernel returns?"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch

from hardpoint.conformance.probe import Probe, run, same_bits
from hardpoint.conformance.trials import Finding
from hardpoint.ops.judge import sequence

_RUNS = 3


def threads(probe: Probe, seed: int) -> Finding:
    """``threads``: no thread is left behind, neither Python's nor the system's."""
    call = probe.call(seed)
    run(call)
    tasks = _num_tasks()
    for _ in range(_RUNS):
        run(call)
    left = [t.name for t in threading.enumerate() if t.ident not in probe.subject.threads and not _is_torchs(t)]
    if left:
        return Finding.failed("thread", "the call", f"threads are left behind: {', '.join(left)}")
    more = _num_tasks() - tasks
    if more > 0:
        return Finding.failed("thread", "the call", f"{more} more threads of the system run after {_RUNS} calls")
    return Finding()


def streams(probe: Probe, seed: int) -> Finding:
    """``streams``: work is ordered on the current stream, which stays the current one."""
    site = probe.subject.site
    current: Any = getattr(torch.get_device_module(site.device), "current_stream", None)
    if site.device.type == "cpu" or current is None:
        return Finding.not_claimed("no-streams", f"{site.device.type} has no streams")
    call = probe.call(seed)
    run(call)
    with torch.inference_mode():
        call.before()
        call.plan()
    site.platform.synchronize()
    before = current()
    with torch.inference_mode():
        results = [*sequence(call.run()), *call.state()]
        after = current()
        # Copies are taken in the order of the current stream: what other streams still write comes too late for them.
        early = [x.clone() for x in results]
        site.platform.synchronize()
        late = [x.clone() for x in results]
    if before != after:
        return Finding.failed("stream", "the call", f"the current stream was {before} before and is {after} now")
    if not same_bits(early, late):
        return Finding.failed("stream", "outputs", "results changed after the current stream had come to them")
    return Finding()


def _num_tasks() -> int:
    """Threads of this process as the system counts them; 0 where it does not say."""
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if sys.platform == "linux" and folder.is_dir() else 0


def _is_torchs(thread: threading.Thread) -> bool:
    """Torch's own helpers, such as its compiler's workers, stay for the life of the process."""
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", type(thread).__module__)).startswith("torch.")
