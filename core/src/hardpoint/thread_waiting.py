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
    os.environ.update(brief_waits())


def brief_waits() -> dict[str, str]:
    """The variables that ``wait_briefly`` sets: none where the user has set one."""
    return {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() else {"GOMP_SPINCOUNT": _SPINS}
