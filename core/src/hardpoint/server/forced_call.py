"""Calls that a model is made to write as plain JSON, where its own syntax of calls cannot be enforced."""

from __future__ import annotations

from typing import Any, ClassVar

from hardpoint.parsers.marked import Block, MarkedToolParser, object_call
from hardpoint_plugin_api import ParserEvent, ToolCallDelta, ToolCallEnd, ToolCallStart, ToolParser


class OneCall(ToolParser):
    """The output is the arguments of a call of ``name``."""

    name: ClassVar[str]

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._began = False

    @classmethod
    def of(cls, name: str) -> type[OneCall]:
        """The parser for a call of ``name``."""
        return type("OneCall", (cls,), {"name": name})

    def feed(self, delta: str) -> list[ParserEvent]:
        return [*self._begin(), ToolCallDelta(0, delta)] if delta else []

    def finish(self) -> list[ParserEvent]:
        return [*self._begin(), ToolCallEnd(0)]

    def _begin(self) -> list[ParserEvent]:
        if self._began:
            return []
        self._began = True
        return [ToolCallStart(0, self.make_id(), self.name)]


class AnyCall(MarkedToolParser):
    """A forced call of any tool: ``{"name": ..., "arguments": {...}}``; content, if cut off before its arguments."""

    openings: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = "{"

    def block(self, opening: str) -> Block:
        return (yield from object_call())
