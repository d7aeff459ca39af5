"""When Python's garbage collector runs: not while modules are imported, and never over what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage inside. The objects that are there at the end stay, and no collection looks at them again.

    For a program's imports. Torch and its like make a million objects, none of which is garbage: full collections
    that look at all of them take an eighth of the import's time, and 0.1 s and more of every later one.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def keep_what_is_there() -> None:
    """Of a process that has loaded its engine: what is there stays, and no garbage collection looks at it again.

    A full one takes 0.1 seconds and more, while tokens wait.
    """
    gc.collect()
    gc.freeze()
