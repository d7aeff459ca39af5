"""Processes of this machine, by way of /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return _fields(pid)[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def engine_processes(below: int) -> list[int]:
    """The cores and ranks among the processes below ``below``, in the order of their start."""
    return [pid for pid in processes(below) if is_core(pid) or is_rank(pid)]


def api_processes(below: int) -> list[int]:
    """The processes that answer HTTP for the server ``below``, in the order of their start."""
    return [pid for pid in processes(below) if _name(pid).startswith("hardpoint-api")]


def processes(below: int) -> list[int]:
    """All processes below ``below``, in the order of their start; those that end meanwhile may be left out."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{below}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, (thread / "children").read_text().split()):
                    found += [child, *processes(child)]
    return sorted(found, key=_started)


def is_core(pid: int) -> bool:
    """Whether a process is the core of an engine."""
    return _name(pid).startswith("hardpoint-core")


def is_rank(pid: int) -> bool:
    """Whether a process is a rank of an engine."""
    return _name(pid).startswith("hardpoint-rank")


def ranks_of(core: int) -> list[int]:
    """The ranks of the engine that was started last, whose core has the process ``core``, in their order."""
    server = int(_fields(core)[1])  # all of them are forked from it
    return [pid for pid in engine_processes(server) if is_rank(pid) and _started(pid) >= _started(core)]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""


def _started(pid: int) -> tuple[int, int]:
    try:
        return int(_fields(pid)[19]), pid
    except (FileNotFoundError, ProcessLookupError):
        return 0, pid


def _fields(pid: int) -> list[str]:
    """The fields of its ``stat`` from the third on, its state."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
