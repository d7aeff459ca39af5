"""Calls as Acme's models write them: ``@clock{"zone": "UTC"}`` in a line of its own."""

from __future__ import annotations

import json
import re

from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
    ToolParserWorkload,
)

_CALL = re.compile(r"@(\w+)(\{.*\})\s*")


class AcmeToolParser(ToolParser):
    """Reads line by line."""

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        self._line: list[str] = []
        self._num_calls = 0

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        return "@tool{" in (workload.chat_template or "")

    def feed(self, delta: str) -> list[ParserEvent]:
        *lines, rest = delta.split("\n")
        events: list[ParserEvent] = []
        for line in lines:
            events += self._read("".join([*self._line, line, "\n"]))
            self._line = []
        self._line.append(rest)
        return events

    def finish(self) -> list[ParserEvent]:
        return self._read("".join(self._line))

    def _read(self, line: str) -> list[ParserEvent]:
        found = _CALL.fullmatch(line)
        try:
            is_call = found is not None and isinstance(json.loads(found[2]), dict)
        except (ValueError, RecursionError):
            is_call = False
        if found is None or not is_call:
            return [ContentDelta(line)] if line else []
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return [ToolCallStart(index, self.make_id(), found[1]), ToolCallDelta(index, found[2]), ToolCallEnd(index)]
