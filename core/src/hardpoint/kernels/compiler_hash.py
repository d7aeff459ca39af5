"""The hash of Triton's own files, which each key of its cache has in it."""

from __future__ import annotations

import threading
from contextlib import suppress

_lock = threading.Lock()
_thread: threading.Thread | None = None


def hash_early() -> None:
    """Begin to compute it in a thread, unless that has begun. Needs no torch.

    It takes a third of a second, most of which runs without Python's lock, and the first kernel waits for it. Triton
    keeps the result. Without Triton, nothing happens.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_hash, name="hardpoint-triton-hash", daemon=True)
            _thread.start()


def wait_for_hash() -> None:
    """Wait for what ``hash_early`` began: a kernel that is launched meanwhile would compute it once more."""
    if _thread is not None:
        _thread.join()


def _hash() -> None:
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
