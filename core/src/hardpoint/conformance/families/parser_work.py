"""How much work a parser does for a text, counted and not timed: the counts are the same on a busy machine."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

WINDOW = 500
EARLY, LATE = 1000, 8000
"""Where the two windows begin. Parsers may look back at a header of some hundred characters: both are beyond that."""

Counts = dict[str, int]


def measure(open_parser: Callable[[], Any], text: str) -> tuple[Counts, Counts]:
    """The cost of reading an early and a late window of ``text``, by character, in counts that show quadratic work.

    ``lines`` are lines of Python that ran: loops over what was read before. ``bytes`` are the sum of the memory that
    each character took at its peak: copies of what was read before. ``scanned`` are the lengths of the texts whose
    methods were called: searches in what was read before. ``text`` has at least LATE + WINDOW characters.
    """
    parser = open_parser()
    found, at = [], 0
    for start in (EARLY, LATE):
        for letter in text[at:start]:
            parser.feed(letter)
        at = start + WINDOW
        found.append(_cost(parser, text[start:at]))
    return found[0], found[1]


def _cost(parser: Any, text: str) -> Counts:
    lines = scanned = copied = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal scanned
        owner = getattr(arg, "__self__", None) if event == "c_call" else None
        if isinstance(owner, str):
            scanned += len(owner)

    was_tracing, outer_trace, outer_profile = tracemalloc.is_tracing(), sys.gettrace(), sys.getprofile()
    if not was_tracing:
        tracemalloc.start()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        for letter in text:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            parser.feed(letter)
            copied += tracemalloc.get_traced_memory()[1] - before
    finally:
        sys.setprofile(outer_profile)
        sys.settrace(outer_trace)
        if not was_tracing:
            tracemalloc.stop()
    return {"lines": lines, "bytes": copied, "scanned": scanned}
