"""The hash of Triton's own files, which each key of its cache has in it."""

from __future__ import annotations

import threading
from contextlib import suppress

_threads: list[threading.Thread] = []


def hash_early() -> None:
    """Begin to compute it in a thread.

    It takes a third of a second, most of which runs without Python's lock, and the first kernel waits for it. Triton
    keeps the result. Without Triton, nothing happens.
    """
    thread = threading.Thread(target=_hash, name="hardpoint-triton-hash", daemon=True)
    _threads.append(thread)
    thread.start()


def wait_for_hash() -> None:
    """Wait for what ``hash_early`` began: a kernel that is launched meanwhile would compute it once more."""
    while _threads:
        _threads.pop().join()


def _hash() -> None:
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
