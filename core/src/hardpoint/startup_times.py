"""When a start's stages ended. ``mark`` costs a clock reading and a dict entry; it may stand on any start path."""

from __future__ import annotations

import json
import time
from pathlib import Path

_marks: dict[str, float] = {}


def mark(stage: str) -> None:
    """Note that ``stage`` ends now; only the first time counts, so that a process marks its own start alone."""
    _marks.setdefault(stage, time.perf_counter())


def write(path: Path) -> None:
    """Write the marks as JSON: stage -> seconds of the machine's monotonic clock, which its processes share."""
    path.write_text(json.dumps(_marks), encoding="utf-8")
