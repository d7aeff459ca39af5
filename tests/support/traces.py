"""Profiles, read back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def trace_events(folder: Path) -> list[dict[str, Any]]:
    """The events of the only trace in ``folder``."""
    (trace,) = folder.glob("*.trace.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events
