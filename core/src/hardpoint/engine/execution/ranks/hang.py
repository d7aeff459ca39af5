"""The work of a rank that hangs, read from the stacks that its process tells, or leaves when it is aborted."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)$', re.MULTILINE)
_GROUPS = "hardpoint/parallel/groups.py"
_COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "all_to_all"})
_RANK = "hardpoint/engine/execution/ranks/rank_process.py"


def own_stacks() -> str:
    """The stacks of this process's threads, as ``describe`` reads them. No file is needed."""
    threads = []
    for number, top in sys._current_frames().items():
        frames = ((frame.f_code, line) for frame, line in traceback.walk_stack(top))
        lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in frames]
        threads.append("\n".join([f"Thread {number:#x} (most recent call first):", *lines]))
    return "\n\n".join(threads)


def describe(stack: str) -> str:
    """Say what a rank was doing, for a sentence about it; ``stack`` is faulthandler's report of its threads.

    A rank that left no stack does not even react to signals.
    """
    if not stack.strip():
        return "does not react"
    threads = [[match.groupdict() for match in _FRAME.finditer(block)] for block in re.split(r"\n\s*\n", stack)]
    for frames in threads:
        for number, frame in enumerate(frames):
            if frame["file"].endswith(_GROUPS) and frame["function"] in _COLLECTIVES:
                caller = next((each for each in frames[number:] if not each["file"].endswith(_GROUPS)), frame)
                return f"waits in {frame['function']}, called in {_place(caller)}"
    working = [frames for frames in threads if _works(frames)]
    return f"is in {_place(working[0][0])}" if working else "is in no step"


def _works(frames: Sequence[dict[str, str]]) -> bool:
    """Whether these are of a thread that loads, runs steps or waits for their results. It is idle in the rank's own
    loops, where it waits for commands or steps; another thread listens."""
    functions = {frame["function"] for frame in frames if frame["file"].endswith(_RANK)}
    return bool(functions) and "listen" not in functions and not frames[0]["file"].endswith(_RANK)


def _place(frame: dict[str, str]) -> str:
    """A frame's function, file within its package, and line."""
    _, found, rest = frame["file"].rpartition("/hardpoint/")
    file = f"hardpoint/{rest}" if found else frame["file"].rpartition("/")[2]
    return f"{frame['function']} ({file}:{frame['line']})"
