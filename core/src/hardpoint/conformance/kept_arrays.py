"""Covering arrays that took long to make, in files of the user's cache, for later runs of the kit.

At level ``full`` one of attention takes some 15 seconds, and each shard of a run needs all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

Rows = list[list[int]]
_WORTH_KEEPING = 1.0
"""Seconds that an array takes to make at least, to be kept."""


def folder() -> Path:
    """Where arrays are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "hardpoint" / "covering_arrays"


def kept(key: str, make: Callable[[], Rows]) -> Rows:
    """The array of ``key``, which says what it covers, as ``make`` makes it. A file that cannot be read or written
    costs the time of making it, and no more."""
    name = hashlib.sha256(f"covertable {version('covertable')}: {key}".encode()).hexdigest()
    path = folder() / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] == key:
            rows: Rows = found["rows"]
            return rows
    except (OSError, ValueError, KeyError, TypeError):
        pass
    began = time.perf_counter()
    rows = make()
    if time.perf_counter() - began >= _WORTH_KEEPING:
        _write(path, json.dumps({"key": key, "rows": rows}))
    return rows


def _write(path: Path, text: str) -> None:
    """All of the file or nothing: other processes of the run write it, too."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            file.write(text)
        os.replace(part, path)
    except OSError:  # a full disk, perhaps
        if part is not None:
            part.unlink(missing_ok=True)
