"""Faults planted in a tool parser and a reasoning parser: each is caught, by the check that should."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import ClassVar

import pytest

from hardpoint.conformance.families.parser_samples import (
    ParserSample,
    SampleCall,
    tool,
)
from hardpoint.conformance.families.parsers import ParserTrials
from hardpoint.conformance.generators import generator_for
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ReasoningDelta,
    ReasoningParser,
    StructuredOutput,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from tests.conformance.trying import Caught, EveryCheck, first_failure, subject

_CALL = re.compile(r"@(\w+)(\{.*\})\s*")
_TOOLS = (tool("f", a={"type": "integer"}), tool("g"))


class Lines(ToolParser):
    """Right: a call is ``@name{...}`` in a line of its own."""

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
        except (ValueError, RecursionError):
            return False

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        names = "|".join([name] if name else self.args.functions)
        call = rf'@({names})\{{("a": [0-9]+)?\}}'
        return StructuredOutput.regex(f"{call}(\n{call})*" if parallel else call)


class ForgetsTheLastLine(Lines):
    def finish(self) -> list[ParserEvent]:
        return []


class SwapsContentAndCalls(Lines):
    """Says what a line is when the next one comes: content in front of a call is said behind it."""

    held: ClassVar[tuple[ParserEvent, ...]] = ()

    def read(self, line: str) -> list[ParserEvent]:
        events = super().read(line)
        if events and isinstance(events[0], ContentDelta) and not self.held:
            self.held = tuple(events)  # type: ignore[misc]  # the instance's own from now on
            return []
        return [*events, *self.taken()]

    def taken(self) -> tuple[ParserEvent, ...]:
        held, self.held = self.held, ()  # type: ignore[misc]  # see above
        return held

    def finish(self) -> list[ParserEvent]:
        return [*super().finish(), *self.taken()]


class DropsTheArguments(Lines):
    def read(self, line: str) -> list[ParserEvent]:
        return [event for event in super().read(line) if not isinstance(event, ToolCallDelta)]


class CallsOnlyInOnePiece(Lines):
    def finish(self) -> list[ParserEvent]:
        line = "".join(self._line)
        return super().finish() if len(self._line) == 1 else [ContentDelta(line)] if line else []


class LosesWhatIsCutOff(Lines):
    def finish(self) -> list[ParserEvent]:
        line = "".join(self._line)
        return [] if line.startswith("@") and not line.endswith("}") else super().finish()


class LosesABrokenCall(Lines):
    def read(self, line: str) -> list[ParserEvent]:
        found = _CALL.fullmatch(line)
        return [] if found and not self.is_json(found[2]) else super().read(line)


class StripsContent(Lines):
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


class OneId(Lines):
    def make_id(self) -> str:
        return "call"


class NeverEnds(Lines):
    def read(self, line: str) -> list[ParserEvent]:
        return [event for event in super().read(line) if not isinstance(event, ToolCallEnd)]


class Shared(Lines):
    """Keeps its line in the class."""

    everyone: ClassVar[list[str]] = []

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        self.everyone.clear()

    def feed(self, delta: str) -> list[ParserEvent]:
        self._line = self.everyone
        events = super().feed(delta)
        self.everyone[:] = self._line
        self._line = self.everyone
        return events


class CountsForAll(Lines):
    """Counts calls in the class, from 0 again when an output ends."""

    count = 0

    def read(self, line: str) -> list[ParserEvent]:
        self._calls = type(self).count
        events = super().read(line)
        type(self).count = self._calls
        return events

    def finish(self) -> list[ParserEvent]:
        events = super().finish()
        type(self).count = 0
        return events


class JoinsForEachCharacter(Lines):
    def feed(self, delta: str) -> list[ParserEvent]:
        self._line = ["".join(self._line)]
        return super().feed(delta)


class SearchesForEachCharacter(Lines):
    """Lets Python's in-place ``+=`` grow a text, and matches all of it again."""

    text = ""

    def feed(self, delta: str) -> list[ParserEvent]:
        self.text += delta
        _CALL.search(self.text)
        return super().feed(delta)


class LoopsForEachCharacter(Lines):
    def feed(self, delta: str) -> list[ParserEvent]:
        for piece in self._line[::3]:
            assert piece is not None
        return super().feed(delta)


class AdmitsProse(Lines):
    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        return StructuredOutput.regex(r"[\s\S]+")


class AdmitsOneCallAlone(Lines):
    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        return super().constraint(name, parallel=False)


class DoesNotCompile(Lines):
    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        return StructuredOutput.grammar("start: nothing")


class Thinks(ReasoningParser):
    """Right: what an output begins with, up to ``>``, is reasoning."""

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


class KeepsThoughtsToItself(Thinks):
    def feed(self, delta: str) -> list[ParserEvent]:
        return [event for event in super().feed(delta) if isinstance(event, ContentDelta)]


class CallsATool(Thinks):
    def finish(self) -> list[ParserEvent]:
        return [ToolCallStart(0, "a", "f"), ToolCallEnd(0)]


class RepeatsItself(Thinks):
    """Says a text without its mark once more."""

    said = ""

    def feed(self, delta: str) -> list[ParserEvent]:
        self.said += delta
        return super().feed(delta)

    def finish(self) -> list[ParserEvent]:
        return [ContentDelta(self.said)] if self._open and self.said.strip("ab ") else []


_TWO = (ContentDelta("Hm.\n"), SampleCall("f", '{"a": 1}'), SampleCall("g"))
LINES = (
    ParserSample("calls", 'Hm.\n@f{"a": 1}\n@g{}', _TWO, _TOOLS),
    ParserSample("no call", " @f{a}\nmail@g{}\n", (ContentDelta(" @f{a}\nmail@g{}\n"),), _TOOLS),
    ParserSample("forced", '@f{"a": 1}\n@g{}', _TWO[1:], _TOOLS, forced=True),
)
THOUGHTS = (
    ParserSample("both", "a b>c", (ReasoningDelta("a b"), ContentDelta("c"))),
    ParserSample("no end", "a", (ReasoningDelta("a"),)),
)
PLANTED: dict[str, tuple[type[ToolParser | ReasoningParser], str]] = {
    "the last line forgotten": (ForgetsTheLastLine, "values"),
    "content behind the call it precedes": (SwapsContentAndCalls, "values"),
    "arguments dropped": (DropsTheArguments, "values"),
    "content stripped": (StripsContent, "values"),
    "a call is whole in one piece alone": (CallsOnlyInOnePiece, "cuts"),
    "a call that is cut off is lost": (LosesWhatIsCutOff, "malformed"),
    "a call that is broken is lost": (LosesABrokenCall, "malformed"),
    "raises on bad JSON": (RaisesOnBadJson, "malformed"),
    "an index for all calls": (OneIndex, "values"),
    "an id for all calls": (OneId, "values"),
    "calls that never end": (NeverEnds, "values"),
    "empty deltas": (EmptyDeltas, "malformed"),
    "a line in the class": (Shared, "state"),
    "a count in the class": (CountsForAll, "state"),
    "copies of all that was read": (JoinsForEachCharacter, "linear-time"),
    "searches in all that was read": (SearchesForEachCharacter, "linear-time"),
    "loops over all that was read": (LoopsForEachCharacter, "linear-time"),
    "a constraint that admits prose": (AdmitsProse, "constraint"),
    "a constraint that admits one call alone": (AdmitsOneCallAlone, "constraint"),
    "a constraint that does not compile": (DoesNotCompile, "constraint"),
    "reasoning for each piece": (ThinksPieceByPiece, "cuts"),
    "reasoning left out": (KeepsThoughtsToItself, "values"),
    "a call from a reasoning parser": (CallsATool, "values"),
    "text said twice": (RepeatsItself, "malformed"),
}


def trials(parser: type[ToolParser | ReasoningParser]) -> tuple[str, ParserTrials]:
    """The family of ``parser``, and its trials with the samples of this file, under the name of one of core's."""
    if issubclass(parser, ToolParser):
        return "tool_parser", ParserTrials("tool_parser", {"hermes": LINES})
    return "reasoning_parser", ParserTrials("reasoning_parser", {"think": THOUGHTS})


def tried(site: Site, parser: type[ToolParser | ReasoningParser]) -> Caught | None:
    family, generator = trials(parser)
    name = "hermes" if family == "tool_parser" else "think"
    return first_failure(subject(site, parser, family, name=name), generator)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    parser, check = PLANTED[title]
    caught = tried(site, parser)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@pytest.mark.parametrize("parser", [Lines, Thinks])
def test_a_right_parser_passes(site: Site, parser: type[ToolParser | ReasoningParser]) -> None:
    caught = tried(site, parser)
    assert caught is None, str(caught)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
@pytest.mark.parametrize("family", ["tool_parser", "reasoning_parser"])
def test_all_of_cores_parsers_pass_and_are_proved(site: Site, family: str, every: int) -> None:
    """In part: one sample in three, without the check of linear time; tests/parsers/test_work.py counts their work."""
    for offer in site.plugins.offers(family):
        generator = generator_for(site.plugins, offer)
        assert generator is not None, f"{offer.contribution} has no samples"
        trials = list(generator.trials(Subject.load(offer, site), Plan()))
        assert len({trial.case for trial in trials}) == len(trials)
        if every > 1:
            trials = [replace(t, checks=[c for c in t.checks if c.name != "linear-time"]) for t in trials[::every]]
        found = [(trial.case, check, finding) for trial in trials for check, finding in trial.run()]
        failed = [(case, check, *finding.faults) for case, check, finding in found if finding.faults]
        assert not failed, f"{offer.contribution}: {failed[:3]}"
        assert sum(finding.compared for _, check, finding in found if check == "values") > 0


def test_without_a_forced_sample_the_constraint_is_compiled_and_said_not_to_be_tried(site: Site) -> None:
    generator = ParserTrials("tool_parser", {"hermes": LINES[:2]})
    cases = {
        t.case: dict(t.run())
        for t in generator.trials(subject(site, Lines, "tool_parser", name="hermes"), EveryCheck())
    }
    assert cases["forced-call"]["constraint"].outcome == "unsupported"
    assert {f.outcome for f in cases["sample/calls"].values()} == {"passed"}
