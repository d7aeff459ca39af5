"""Faults planted in a tool parser and a reasoning parser: each is caught, by the check that should."""

from __future__ import annotations

import json
import re
from typing import ClassVar

import pytest

from hardpoint.conformance.families.parsers import ParserTrials
from hardpoint.conformance.site import Site
from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ParserExample,
    ReasoningDelta,
    ReasoningParser,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from tests.conformance.trying import EveryCheck, first_failure, subject

_CALL = re.compile(r"@(\w+)(\{.*\})\s*")


class Lines(ToolParser):
    """Right: a call is ``@name{...}`` in a line of its own."""

    examples: ClassVar[tuple[ParserExample, ...]] = (
        ParserExample('Hm.\n@f{"a": 1}\n@g{}', content="Hm.\n", calls=(("f", '{"a": 1}'), ("g", "{}"))),
    )

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        self._line: list[str] = []
        self._calls = 0

    def feed(self, delta: str) -> list[ParserEvent]:
        *lines, rest = delta.split("\n")
        events: list[ParserEvent] = []
        for line in lines:
            events += self.read("".join([*self._line, line, "\n"]))
            self._line = []
        self._line.append(rest)
        return events

    def finish(self) -> list[ParserEvent]:
        return self.read("".join(self._line))

    def read(self, line: str) -> list[ParserEvent]:
        found = _CALL.fullmatch(line)
        if found is None or not self.is_json(found[2]):
            return [ContentDelta(line)] if line else []
        index, self._calls = self._calls, self._calls + 1
        return [ToolCallStart(index, self.make_id(), found[1]), ToolCallDelta(index, found[2]), ToolCallEnd(index)]

    def is_json(self, text: str) -> bool:
        try:
            return isinstance(json.loads(text), dict)
        except ValueError:
            return False


class WithoutExamples(Lines):
    examples = ()


class ForgetsTheLastLine(Lines):
    def finish(self) -> list[ParserEvent]:
        return []


class CallsOnlyInOnePiece(Lines):
    def feed(self, delta: str) -> list[ParserEvent]:
        return self.read(delta) if _CALL.fullmatch(delta) else super().feed(delta)


class LosesContentBeforeCalls(Lines):
    def read(self, line: str) -> list[ParserEvent]:
        return [] if line.startswith("Hm") else super().read(line)


class StripsContent(Lines):
    examples = (ParserExample("@f{}", calls=(("f", "{}"),)),)

    def read(self, line: str) -> list[ParserEvent]:
        return super().read(line.strip())


class RaisesOnBadJson(Lines):
    def is_json(self, text: str) -> bool:
        return isinstance(json.loads(text), dict)


class EmptyDeltas(Lines):
    def read(self, line: str) -> list[ParserEvent]:
        return super().read(line) or [ContentDelta("")]


class OneIndex(Lines):
    def read(self, line: str) -> list[ParserEvent]:
        self._calls = 0
        return super().read(line)


class Shared(Lines):
    """Keeps its line in the class."""

    _all: ClassVar[list[str]] = []

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        self._all.clear()

    def feed(self, delta: str) -> list[ParserEvent]:
        self._line = self._all
        events = super().feed(delta)
        self._all[:] = self._line
        self._line = self._all
        return events


class Quadratic(Lines):
    """Looks at the whole line for each character."""

    def feed(self, delta: str) -> list[ParserEvent]:
        sum(ord(letter) for letter in "".join(self._line[-100_000:]))
        return super().feed(delta)


class Thinks(ReasoningParser):
    """Right: what an output begins with, up to ``>``, is reasoning."""

    examples = (ParserExample("a b>c", content="c", reasoning="a b"), ParserExample("a", reasoning="a"))
    _open = True

    def feed(self, delta: str) -> list[ParserEvent]:
        thought, mark, rest = delta.partition(">") if self._open else ("", "", delta)
        self._open = self._open and not mark
        events: list[ParserEvent] = [ReasoningDelta(thought)] if thought else []
        return events + ([ContentDelta(rest)] if rest else [])

    def finish(self) -> list[ParserEvent]:
        return []


class ThinksPieceByPiece(Thinks):
    def feed(self, delta: str) -> list[ParserEvent]:
        self._open = True
        return super().feed(delta)


@pytest.mark.parametrize(("family", "parser"), [("tool_parser", Lines), ("reasoning_parser", Thinks)])
def test_a_right_one_passes(site: Site, family: str, parser: type) -> None:
    name = site.plugins.names(family)[0]
    tried = subject(site, parser, family, name=name)
    caught = first_failure(tried, ParserTrials(family))
    # ``Thinks`` takes the mark away, so that plain text with one in it loses a character: its author's affair.
    assert caught is None or (parser is Thinks and caught.check == "content"), caught


def test_without_examples_its_values_are_not_proved(site: Site) -> None:
    tried = subject(site, WithoutExamples, "tool_parser", name=site.plugins.names("tool_parser")[0])
    trials = {trial.case: dict(trial.run()) for trial in ParserTrials("tool_parser").trials(tried, EveryCheck())}
    assert trials["examples"]["values"].outcome == "unsupported"
    assert {finding.outcome for finding in trials["any-text"].values()} == {"passed"}


@pytest.mark.parametrize(
    ("parser", "check"),
    [
        (ForgetsTheLastLine, "values"),
        (CallsOnlyInOnePiece, "damaged"),
        (LosesContentBeforeCalls, "values"),
        (StripsContent, "content"),
        (RaisesOnBadJson, "damaged"),
        (EmptyDeltas, "content"),
        (OneIndex, "values"),
        (Shared, "apart"),
        (Quadratic, "linear"),
        (ThinksPieceByPiece, "values"),
    ],
)
def test_a_faulty_one_is_caught(site: Site, parser: type[ToolParser], check: str) -> None:
    family = "tool_parser" if issubclass(parser, ToolParser) else "reasoning_parser"
    tried = subject(site, parser, family, name=site.plugins.names(family)[0])
    caught = first_failure(tried, ParserTrials(family))
    assert caught is not None
    assert caught.check == check, caught
