"""Feeding parsers, and what they said in a form that does not depend on how the text was cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hardpoint.config import EngineConfig
from hardpoint.conformance.families.parser_samples import TOOLS
from hardpoint.parsers import OutputParser, Parsers, choose_parsers
from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

TOOL_PARSERS = ("deepseek", "dsml", "glm", "harmony", "hermes", "kimi", "llama3_json", "mistral", "pythonic")
REASONING_PARSERS = ("deepseek_r1", "harmony", "mistral", "think")


@cache
def parsers(tool: str = "none", reasoning: str = "none") -> Parsers:
    """The parsers of these names."""
    return choose_parsers(EngineConfig.create(model="demo", tool_parser=tool, reasoning_parser=reasoning))


def read(parser: OutputParser, pieces: Sequence[str]) -> list[tuple[str, ...]]:
    """The events of ``pieces``: content and reasoning joined, each call with its name and arguments."""
    events: list[ParserEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    return joined([*events, *parser.finish()])


def joined(events: Sequence[ParserEvent]) -> list[tuple[str, ...]]:
    """``events`` with neighbouring deltas joined; checks that calls are counted, and one is open at a time."""
    found: list[tuple[list[str], list[str]]] = []  # kind, and a call's name; then pieces of text
    ids: set[str] = set()
    is_open = False
    for event in events:
        match event:
            case ContentDelta(text) | ReasoningDelta(text):
                assert text
                assert not is_open
                kind = "content" if isinstance(event, ContentDelta) else "reasoning"
                if not found or found[-1][0] != [kind]:
                    found.append(([kind], []))
                found[-1][1].append(text)
            case ToolCallStart(index, call_id, name):
                assert not is_open
                assert index == sum(head[0] == "call" for head, _ in found)
                assert call_id not in ids
                ids.add(call_id)
                found.append((["call", name], []))
                is_open = True
            case ToolCallDelta(_, arguments):
                assert arguments
                assert is_open
                found[-1][1].append(arguments)
            case ToolCallEnd():
                assert is_open
                is_open = False
                head, pieces = found[-1]
                assert pieces[0].startswith("{")
                head[1].encode()
    assert not is_open
    return [(*head, "".join(pieces)) for head, pieces in found]


def opened(tool: str = "none", reasoning: str = "none", prompt: str = "") -> OutputParser:
    """A parser for one output."""
    return parsers(tool, reasoning).open(ParserArgs(tools=TOOLS, prompt=prompt))
