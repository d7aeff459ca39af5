"""Profiles by torch's own profiler, for platforms whose work goes through torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path


@contextmanager
def torch_trace(folder: Path) -> Iterator[None]:
    """Record operators, kernels and ranges of all threads; leave ``hardpoint-TIME-PID.trace.json.gz`` in ``folder``.

    Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show the file.
    """
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile, supported_activities

    # Steps run in whatever thread calls the engine, so that no one thread's events would do.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=supported_activities(), experimental_config=every_thread, acc_events=True) as trace:
        yield
    name = f"hardpoint-{datetime.now():%Y%m%d-%H%M%S-%f}-{os.getpid()}.trace.json.gz"
    trace.export_chrome_trace(str(folder / name))
