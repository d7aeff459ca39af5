"""Freed memory stays with a process that asks for it, and the system clears no pages for the next tensor."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")

_PROGRAM = """
import resource, torch
from hardpoint.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        for size in (2**26, 2**25, 2**26):
            [torch.ones(size, dtype=torch.uint8) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), keep_freed_memory(), faults(), faults())
"""


def test_tensors_take_the_memory_of_those_before() -> None:
    """In rounds of the same sizes; the first rounds of a process that keeps memory take it from the system."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    given_back, can, _, kept = done.stdout.split()
    if can == "False":
        pytest.skip("the C library is not glibc")
    assert 10 * int(kept) < int(given_back)
