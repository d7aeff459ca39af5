"""Trials of tool and reasoning parsers: samples of outputs, and what models make of them on bad days.

The syntax is told by samples: core's own in ``parser_samples.py``; a plugin returns ``ParserTrials`` with samples of
its own from ``hardpoint_conformance``. Every other check follows from the contract of ``ToolParser`` and
``ReasoningParser``: cuts make no difference, nothing raises, no text is lost, work is linear, nothing is shared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

from hardpoint.conformance.families.parser_samples import (
    REASONING_SAMPLES,
    TOOL_SAMPLES,
    ParserSample,
    Said,
    SampleCall,
)
from hardpoint.conformance.families.parser_work import EARLY, LATE, WINDOW, measure
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.structured.bytes import accepts
from hardpoint_plugin_api import (
    ContentDelta,
    Contribution,
    ParserArgs,
    ParserEvent,
    ReasoningDelta,
    StructuredOutput,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

_NUM_MUTATED, _NUM_PREFIXES, _NUM_CUTS = 24, 48, 8
_MOST_GROWTH = 1.6
"""A late character costs as much as an early one, or not much more; with quadratic work, more than twice as much."""
_SLACK = 2048
"""The most that a character may cost in any count: measuring takes memory, too, and states differ in their work."""
_HOSTILE = (
    *(text * 400 for text in ("{", "[", '{"x":', '"', "\\", "\n", "<", "(", "'")),
    '{"name": "\\ud800", "arguments": {"x": NaN}}',
    "\x00\u2028\u0085\U0001f40b\ufffd\u200d",
)


class ParserTrials:
    """The generator of the family ``tool_parser`` or ``reasoning_parser``. ``samples`` are by the parser's name."""

    def __init__(self, family: str, samples: Mapping[str, Sequence[ParserSample]] | None = None) -> None:
        self.family = family
        core = TOOL_SAMPLES if family == "tool_parser" else REASONING_SAMPLES
        self._samples = core if samples is None else samples

    def serves(self, contribution: Contribution) -> bool:
        """Whether there are samples of the parser's syntax."""
        return bool(self._samples.get(contribution.name))

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Each sample; and once, the constraint on a forced call."""
        samples = self._samples[subject.offer.contribution.name]
        marks = max(_num_marks(sample) for sample in samples)
        for number, sample in enumerate(samples):
            probe = ParserProbe(subject.target, sample, plan.seed_of(f"{self.family}/{sample.name}"), marks)
            checks = [
                Check("values", probe.values, decisive=True),
                Check("cuts", probe.cuts),
                Check("malformed", probe.malformed),
                Check("state", partial(probe.state, samples[number - 1])),
            ]
            if plan.includes(0, number):
                checks.append(Check("linear-time", probe.linear_time))
            yield Trial(f"sample/{sample.name}", checks)
        if self.family == "tool_parser":
            yield Trial("forced-call", [Check("constraint", partial(constraint, subject.target, samples))])


class BadEventsError(Exception):
    """Events that the contract does not allow."""


@dataclass(frozen=True)
class ParserProbe:
    """One sample, and the parser that reads it. ``marks`` is how many characters of marks the syntax's samples have."""

    target: Callable[[ParserArgs], Any]
    sample: ParserSample
    seed: int
    marks: int

    def open(self) -> Any:
        """A parser for one more output."""
        return self.target(ParserArgs(tools=self.sample.tools, prompt=self.sample.prompt))

    def read(self, pieces: Sequence[str]) -> tuple[Said, ...]:
        """The events of a new parser for ``pieces``. Raises what the parser raises, and BadEventsError."""
        parser = self.open()
        return joined([event for piece in pieces if piece for event in parser.feed(piece)] + list(parser.finish()))

    def values(self) -> Finding:
        """``values``: the whole text means what the sample says."""
        try:
            found = self.read([self.sample.text])
        except BadEventsError as error:
            return Finding.failed("events", self.sample.name, str(error))
        for number, (got, wanted) in enumerate(zip_longest(found, self.sample.said)):
            if got != wanted:
                return Finding.failed("values", f"part {number}", f"expected {wanted}, got {got}")
        return Finding(compared=sum(map(_size, self.sample.said)))

    def cuts(self) -> Finding:
        """``cuts``: in two pieces cut at every place, by character, and in any pieces, the text means the same."""
        text, wanted = self.sample.text, self.sample.said
        draw = random.Random(self.seed)
        ways = [list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
        ways += [_cut(text, draw) for _ in range(_NUM_CUTS)]
        for pieces in ways:
            if fault := self._fault(pieces, wanted):
                return fault
        return Finding()

    def malformed(self) -> Finding:
        """``malformed``: damaged, broken off and hostile text raises nothing, is not lost, and may be cut anywhere."""
        draw = random.Random(self.seed)
        for text in (*self._damaged(draw), *_HOSTILE):
            try:
                found = self.read([text])
            except BadEventsError as error:
                return Finding.failed("events", f"{text!r:.100}", str(error))
            except Exception as error:  # the plugin's: whatever it raises is to be told
                return Finding.failed("raises", f"{text!r:.100}", f"{type(error).__name__}: {error}")
            if fault := self._lost(text, found):
                return fault
            for pieces in (list(text), _cut(text, draw)):
                if fault := self._fault(pieces, found):
                    return fault
        return Finding()

    def _damaged(self, draw: random.Random) -> Iterator[str]:
        text = self.sample.text
        step = max(1, len(text) // _NUM_PREFIXES)
        for end in range(0, len(text), step):
            yield text[:end]
            yield text[:end] + text
        for _ in range(_NUM_MUTATED):
            letters = list(text + draw.choice(("", "\n", "so ", text)))
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(letters))
                letters[at] = draw.choice(("", letters[at] * 2, draw.choice(text), "\n", "}", "é", "\U0001f40b"))
            yield "".join(letters)
        half = text[: len(text) // 2]
        yield from (half + hostile for hostile in _HOSTILE)

    def _lost(self, text: str, found: Sequence[Said]) -> Finding | None:
        """Text outside of calls is content: all of it where there is no call, and never in another order."""
        said = "".join(part.text for part in found if not isinstance(part, SampleCall))
        calls = [part for part in found if isinstance(part, SampleCall)]
        where = f"{text!r:.100}"
        if not calls and self._is_tool_parser and said != text:
            return Finding.failed("lost", where, f"without a call all of it is content, and not {said!r:.100}")
        letters = iter(text)
        if not all(letter in letters for letter in said):
            return Finding.failed("invented", where, f"{said!r:.100} is not in it in this order")
        # Blanks beside a mark may go with it. A copy of a sample has so many marks, and the text has no more copies
        # than first letters of one.
        said += "".join(call.name + call.arguments for call in calls)
        gone = _num_letters(text) - _num_letters(said)
        copies = max(1, text.count(self.sample.text[:1]), len(calls))
        if self.sample.text in text and gone > self.marks * copies + len(calls):
            return Finding.failed("lost", where, f"{gone} characters are neither content nor in a call")
        return None

    @property
    def _is_tool_parser(self) -> bool:
        return hasattr(self.target, "constraint")

    def _fault(self, pieces: Sequence[str], wanted: Sequence[Said]) -> Finding | None:
        where = f"{pieces!r:.100}"
        try:
            found = self.read(pieces)
        except BadEventsError as error:
            return Finding.failed("events", where, str(error))
        except Exception as error:  # the plugin's: whatever it raises is to be told
            return Finding.failed("raises", where, f"{type(error).__name__}: {error}")
        if found != wanted:
            return Finding.failed("cuts", where, f"in one piece it is {wanted!r:.200}, so cut {found!r:.200}")
        return None

    def state(self, other: ParserSample) -> Finding:
        """``state``: outputs that are read by turns, and one after another was given up, mean what they mean alone."""
        samples = (self.sample, other, self.sample)
        probes = [replace(self, sample=sample) for sample in samples]
        abandoned = self.open()
        abandoned.feed(self.sample.text[: len(self.sample.text) // 2])
        parsers, events = [probe.open() for probe in probes], [list[ParserEvent]() for _ in probes]
        for letters in zip_longest(*(sample.text for sample in samples)):
            for letter, parser, found in zip(letters, parsers, events, strict=True):
                found += parser.feed(letter) if letter else []
        for sample, parser, found in zip(samples, parsers, events, strict=True):
            try:
                got = joined(found + list(parser.finish()))
            except BadEventsError as error:
                return Finding.failed("state", sample.name, f"beside other outputs: {error}")
            if got != sample.said:
                return Finding.failed("state", sample.name, f"beside other outputs it becomes {got!r:.200}")
        return Finding()

    def linear_time(self) -> Finding:
        """``linear-time``: a late character costs as much work as an early one, wherever the sample breaks off."""
        text = self.sample.text
        measured: dict[str, tuple[float, float]] = {}
        third = len(text) // 3
        heads = (text[:third], text[: 2 * third], text[:-1])
        endless = [*((head, "x") for head in heads), (heads[-1], " "), ("", text[: len(text) // 2] or "x"), ("", text)]
        for head, rest in endless:
            early, late = measure(self.open, head + rest * ((LATE + WINDOW) // len(rest) + 1))
            for kind, count in late.items():
                growth = count / (early[kind] + _SLACK * WINDOW)
                measured[kind] = max(measured.get(kind, (0.0, _MOST_GROWTH)), (growth, _MOST_GROWTH))
                if growth > _MOST_GROWTH:
                    sizes = f"{WINDOW} characters cost {early[kind]} behind {EARLY} and {count} behind {LATE}"
                    return Finding.failed("quadratic", f"{head!r:.60} and {rest!r:.60} for ever", f"{kind}: {sizes}")
        return Finding(measured=measured)


def joined(events: Sequence[ParserEvent]) -> tuple[Said, ...]:
    """``events`` with neighbouring deltas joined. Raises BadEventsError for what the contract does not allow."""
    said: list[Said] = []
    ids: set[str] = set()
    is_open = False
    for event in events:
        if is_open and not isinstance(event, ToolCallDelta | ToolCallEnd):
            raise BadEventsError(f"{type(event).__name__} before call {len(ids) - 1} has ended")
        last = said[-1] if said else None
        match event:
            case ContentDelta(text) | ReasoningDelta(text):
                if not text:
                    raise BadEventsError(f"an empty {type(event).__name__}")
                if isinstance(last, type(event)):
                    said[-1] = type(event)(last.text + text)
                else:
                    said.append(event)
            case ToolCallStart(index, call_id, name):
                if index != len(ids) or call_id in ids or not name:
                    raise BadEventsError(f"{event} where call {len(ids)} is next, with a name and an id of its own")
                ids.add(call_id)
                said.append(SampleCall(name, ""))
                is_open = True
            case ToolCallDelta(index, arguments) if is_open and index == len(ids) - 1:
                assert isinstance(last, SampleCall)
                if not arguments:
                    raise BadEventsError("an empty ToolCallDelta")
                said[-1] = SampleCall(last.name, last.arguments + arguments)
            case ToolCallEnd(index) if is_open and index == len(ids) - 1:
                is_open = False
            case _:
                raise BadEventsError(f"{event!r:.80} is of a call that is not open, or is no event")
    if is_open:
        raise BadEventsError(f"call {len(ids) - 1} never ends")
    return tuple(said)


def constraint(target: Callable[[ParserArgs], Any], samples: Sequence[ParserSample]) -> Finding:
    """``constraint``: it compiles for each tool and for all, admits the forced samples, and no text without a call."""
    offered = False
    for sample in samples:
        parser = target(ParserArgs(tools=sample.tools, prompt=sample.prompt))
        for name in (None, *parser.args.functions):
            for parallel in (True, False):
                made: StructuredOutput | None = parser.constraint(name, parallel=parallel)
                if made is None:
                    continue
                offered = True
                if accepts(made, "It was late."):
                    return Finding.failed("constraint", f"{name or 'any tool'}", "admits an output without a call")
                if name is None and parallel and sample.forced and not accepts(made, sample.text):
                    return Finding.failed("constraint", sample.name, f"does not admit {sample.text!r:.100}")
    if not offered:
        return Finding.not_claimed("constraint", "the parser offers no constraint that forces a call")
    if not any(sample.forced for sample in samples):
        return Finding.not_claimed("constraint", "no sample is marked ``forced``, so that none was held to it")
    return Finding()


def _size(part: Said) -> int:
    return _num_letters(part.name + part.arguments if isinstance(part, SampleCall) else part.text)


def _num_marks(sample: ParserSample) -> int:
    return max(0, _num_letters(sample.text) - sum(map(_size, sample.said)))


def _num_letters(text: str) -> int:
    """The number of characters that are not blanks."""
    return sum(map(len, text.split()))


def _cut(text: str, draw: random.Random) -> list[str]:
    """``text`` in pieces of one to nine characters."""
    places = [0]
    while places[-1] < len(text):
        places.append(min(len(text), places[-1] + draw.randint(1, 9)))
    return [text[a:b] for a, b in pairwise(places)]
