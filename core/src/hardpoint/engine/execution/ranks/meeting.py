"""The files by which the ranks of replicas that share experts find each other. All their cores are on this host."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hardpoint.config import EngineConfig
from hardpoint_plugin_api import EngineDeadError

_RETRY_SECONDS = 0.02


def meeting_place(config: EngineConfig, name: str) -> Path:
    """The file ``name`` in the folder of the replicas.

    A start that finds a kernel at fault is repeated on all of them without the kernel, and has a file of its own.
    """
    return Path(config.meeting) / f"{name}-{len(config.deny)}"


def leave_word(place: Path, word: str) -> None:
    """Write the file at ``place``, for those who wait for it."""
    unfinished = place.with_suffix(".new")
    unfinished.write_text(word)
    os.replace(unfinished, place)


def await_word(place: Path, patience: float) -> str:
    """The text that is, or will be, at ``place``. Raises EngineDeadError after ``patience`` seconds without."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return place.read_text()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"replica 0, with which this one shares experts, did not come within {patience:g} seconds "
                    "(--core-start-timeout)"
                ) from None
            time.sleep(_RETRY_SECONDS)
