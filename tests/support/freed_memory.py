"""Memory that a process has freed: it may stay with the process, for its next allocations."""

from __future__ import annotations

import ctypes

KEPT = 2**30
"""Bytes of freed memory that a process keeps at most, at the end of its heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Have the C library keep up to ``KEPT`` bytes that are freed, for the rest of the process; False where it is not
    one that can (glibc).

    By default glibc maps each tensor of 32 MB and more by itself and returns it to the system as soon as it is freed
    (mallopt(3), M_MMAP_THRESHOLD). The next tensor is mapped anew, and the system clears each page of it when it is
    touched. That took a third of the processor time of checks that draw large weights again and again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT))
