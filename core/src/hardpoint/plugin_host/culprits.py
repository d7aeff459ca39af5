"""Which kernel brought an engine down: what crashes and tracebacks say, and whose code that is. Needs no torch.

An engine's process says once what code of which plugin serves it. When it fails, the stack that it left (faulthandler's
for a crash, a traceback for an exception) is read elsewhere: the innermost frame that belongs to somebody decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from hardpoint.plugin_host.record import CORE

KERNELS = frozenset({"op", "layer", "attention", "linear", "experts"})
"""Families whose contributions can be denied: what computes, and what has another to take its place."""

_NAMED = re.compile(r"kernel (?P<slot>[\w.]+)=(?P<name>[\w.+-]+) of plugin (?P<plugin>[\w.-]+)(?: \((?P<use>.*)\))?")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$', re.MULTILINE)
_TENSORS = re.compile(r"Tensors there: .*")
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)

Span = tuple[str, int, int]
"""A file, and the first and last line of code in it."""


@dataclass(frozen=True)
class Suspect:
    """A contribution that serves an engine, and where its code is. ``slot`` is its family, or as in ``op.rms_norm``;
    ``uses`` are the workloads that it was chosen for."""

    plugin: str
    slot: str
    name: str
    spans: tuple[Span, ...] = ()
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Culprit:
    """The contribution in whose code an engine failed, and what is known of the call: workload, tensors, line."""

    plugin: str
    slot: str
    name: str
    where: str

    @property
    def choice(self) -> str:
        """The value for the flag --deny."""
        return f"{self.slot}={self.name}"

    def __str__(self) -> str:
        return f"{self.choice} of plugin {self.plugin} ({self.where})"

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return {"plugin": self.plugin, "slot": self.slot, "name": self.name, "where": self.where}


def code_spans(target: object) -> tuple[Span, ...]:
    """Where the code of a function, a class or a callable object is, for as much of it as Python knows."""
    members = [target]
    if not hasattr(target, "__code__"):
        kind = target if isinstance(target, type) else type(target)
        members = [member for base in kind.__mro__ for member in vars(base).values()]
    spans = []
    for member in members:
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            spans.append(_span(code))
    return tuple(dict.fromkeys(spans))


def _span(code: CodeType) -> Span:
    """The lines of a function, with those of the functions inside it."""
    lines = [line for _, _, line in code.co_lines() if line is not None] or [code.co_firstlineno]
    inner = [_span(const) for const in code.co_consts if isinstance(const, CodeType)]
    return code.co_filename, code.co_firstlineno, max([*lines, *(last for _, _, last in inner)])


def call_name(slot: str, name: str, plugin: str, use: str) -> str:
    """The name of a function around a kernel's calls, by which a stack shows the kernel."""
    return f"kernel {slot}={name} of plugin {plugin} ({use})".encode("ascii", "replace").decode()[:400]


def find_culprit(stack: str, suspects: Sequence[Suspect], *, named_alone: bool = False) -> Culprit | None:
    """The kernel that ran where ``stack`` (a traceback, or faulthandler's output) ends; None where none can be named.

    ``named_alone``: lines prove nothing, since the device failed at some earlier call.
    """
    for file, line, function in _innermost_first(stack):
        if named := _NAMED.fullmatch(function):
            if named["plugin"] == CORE:
                return None
            return Culprit(named["plugin"], named["slot"], named["name"], named["use"] or "")
        if named_alone:
            continue
        for suspect in suspects:
            if any(file == path and first <= line <= last for path, first, last in suspect.spans):
                tensors = _TENSORS.search(stack)
                known = [*suspect.uses, *([tensors[0]] if tensors else []), f"{file}, line {line}"]
                return Culprit(suspect.plugin, suspect.slot, suspect.name, "; ".join(known))
    return None


def _innermost_first(stack: str) -> Iterator[tuple[str, int, str]]:
    threads = [part for part in _THREAD.split(stack) if part.startswith(("Current thread", "Thread"))]
    if threads:  # faulthandler: innermost first already; the thread that crashed may know no Python
        for thread in sorted(threads, key=lambda part: not part.startswith("Current")):
            yield from _frames(thread)
    else:
        yield from reversed(list(_frames(stack)))


def _frames(text: str) -> Iterable[tuple[str, int, str]]:
    return ((found["file"], int(found["line"]), found["function"]) for found in _FRAME.finditer(text))
