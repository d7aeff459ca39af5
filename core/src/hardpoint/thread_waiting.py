"""How the threads of torch's CPU operators wait for each other. Importing this imports nothing else."""

from __future__ import annotations

import os

_SPINS = "1000"
"""Some 20 microseconds, as the compiled kernels' own threads wait (csrc/team.cpp)."""


def wait_briefly() -> None:
    """Have a thread that waits for others give up its core soon. To be called before torch is imported.

    By default a thread of GNU's OpenMP runtime, torch's own, spins for milliseconds. Where another process uses a core,
    it thereby keeps the thread that it waits for from running: eager steps took 30 times as long
    (docs/measurements/host.md). Variables that the user has set stay.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
