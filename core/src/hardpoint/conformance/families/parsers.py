"""Trials of tool and reasoning parsers: their own examples, and text that anybody may write.

What a syntax means is its author's to say, by ``examples``. What holds of every parser is tried without them: events do
not depend on how the text was cut, nothing raises, plain text stays as it is, and work is linear in the text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint_plugin_api import (
    ContentDelta,
    Contribution,
    ParserArgs,
    ParserEvent,
    ParserExample,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

_PLAIN = ParserExample("It was late.\nThe whale, it seemed, slept: 3 > 2, e-mail me.\n\n")
_NUM_DAMAGED = 24
_LENGTHS = (1_000, 8_000)
_MOST_GROWTH = 24
"""Eight times the text, eight times the work; quadratic work is sixty-four times. Between them lies the noise."""
_LEAST_SECONDS = 0.05


class ParserTrials:
    """The generator of the family ``tool_parser`` or ``reasoning_parser``."""

    def __init__(self, family: str) -> None:
        self.family = family

    def serves(self, contribution: Contribution) -> bool:
        """All parsers: they share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Each example, and what it becomes where a model makes mistakes."""
        examples: Sequence[ParserExample] = subject.target.examples
        for number, example in enumerate(examples):
            yield Trial(f"example/{number}", [Check("values", partial(values, subject, example))])
        if not examples:
            missing = Finding.not_claimed("examples", "the parser brings no examples of its syntax")
            yield Trial("examples", [Check("values", lambda: missing)])
        texts = [example.text for example in examples] or [_PLAIN.text]
        checks = [
            Check("content", partial(content, subject)),
            Check("damaged", partial(damaged, subject, texts, plan.seed)),
            Check("apart", partial(apart, subject, texts[0])),
            Check("linear", partial(linear, subject, texts)),
        ]
        yield Trial("any-text", checks)


def _parser(subject: Subject, example: ParserExample) -> Any:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name, _ in example.calls]
    return subject.target(ParserArgs(tools=tools))


def _read(parser: Any, pieces: Sequence[str]) -> list[ParserEvent]:
    return [event for piece in pieces for event in parser.feed(piece)] + list(parser.finish())


def _meaning(text: str, events: Sequence[ParserEvent]) -> ParserExample:
    """What events say, deltas joined. Raises ValueError for events that no call consists of."""
    said, thought = "", ""
    calls: dict[int, list[str]] = {}
    ended: set[int] = set()
    for event in events:
        if isinstance(event, ContentDelta | ReasoningDelta) and not event.text:
            raise ValueError(f"an empty {type(event).__name__}")
        if isinstance(event, ContentDelta):
            said += event.text
        elif isinstance(event, ReasoningDelta):
            thought += event.text
        elif isinstance(event, ToolCallStart):
            if event.index != len(calls):
                raise ValueError(f"call {event.index} begins where {len(calls)} is next")
            calls[event.index] = [event.name, ""]
        elif isinstance(event, ToolCallDelta | ToolCallEnd) and (event.index not in calls or event.index in ended):
            raise ValueError(f"{type(event).__name__} of call {event.index}, which is not open")
        elif isinstance(event, ToolCallDelta):
            calls[event.index][1] += event.arguments
        elif isinstance(event, ToolCallEnd):
            ended.add(event.index)
        else:
            raise ValueError(f"{event!r:.80} is no event")
    return ParserExample(text, said, thought, tuple((name, arguments) for name, arguments in calls.values()))


def _cuts(text: str) -> Iterator[list[str]]:
    """Ways to cut ``text``: whole, by character, at every place into two, and with empty pieces."""
    yield [text]
    yield list(text)
    yield from ([text[:place], text[place:]] for place in range(1, len(text)))
    yield ["", *(piece for a, b in pairwise([*range(0, len(text), 3), len(text)]) for piece in (text[a:b], ""))]


def _differs(subject: Subject, example: ParserExample) -> Finding | None:
    """The first cut by which the parser does not read ``example`` as it says."""
    for pieces in _cuts(example.text):
        try:
            found = _meaning(example.text, _read(_parser(subject, example), pieces))
        except Exception as error:  # the plugin's: whatever it raises is to be told
            return Finding.failed("raises", f"{pieces!r:.100}", f"{type(error).__name__}: {error}")
        if found != example:
            return Finding.failed("events", f"{pieces!r:.100}", f"expected {example}, got {found}")
    return None


def values(subject: Subject, example: ParserExample) -> Finding:
    """``values``: the example means what its author says, however it is cut."""
    return _differs(subject, example) or Finding(compared=len(example.text))


def content(subject: Subject) -> Finding:
    """``content``: text with nothing in it that is marked comes out as it is, all of it."""
    found = _meaning(_PLAIN.text, _read(_parser(subject, _PLAIN), [_PLAIN.text]))
    if found.calls or found.content + found.reasoning != _PLAIN.text:
        return Finding.failed("content", "plain text", f"{_PLAIN.text!r} becomes {found}")
    return _differs(subject, found) or Finding()


def damaged(subject: Subject, texts: Sequence[str], seed: int) -> Finding:
    """``damaged``: examples with characters lost, doubled and exchanged raise nothing and do not depend on cuts."""
    draw = random.Random(seed)
    for _ in range(_NUM_DAMAGED):
        text = list(draw.choice(texts) + draw.choice(texts))
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(text))
            text[place] = draw.choice(("", text[place] * 2, draw.choice(text), "\n", "}", "é", "\U0001f40b"))
        whole = "".join(text)
        try:
            found = _meaning(whole, _read(_parser(subject, _PLAIN), [whole]))
        except Exception as error:  # the plugin's: whatever it raises is to be told
            return Finding.failed("raises", f"{whole!r:.100}", f"{type(error).__name__}: {error}")
        if finding := _differs(subject, found):
            return finding
    return Finding()


def apart(subject: Subject, text: str) -> Finding:
    """``apart``: two outputs at once do not mix."""
    alone = _meaning(text, _read(_parser(subject, _PLAIN), list(text)))
    parsers = [_parser(subject, _PLAIN) for _ in range(2)]
    events: list[list[ParserEvent]] = [[], []]
    for piece in text:
        for parser, found in zip(parsers, events, strict=True):
            found += parser.feed(piece)
    both = [_meaning(text, found + list(parser.finish())) for parser, found in zip(parsers, events, strict=True)]
    return Finding() if both == [alone, alone] else Finding.failed("apart", f"{text!r:.80}", "reads another's text")


def linear(subject: Subject, texts: Sequence[str]) -> Finding:
    """``linear``: eight times the text, by character, takes about eight times as long: also where no line ends."""
    for text in (*texts, "x", texts[0].rstrip()[:-1] or "x"):
        times = []
        for length in _LENGTHS:
            pieces = list((text + "x" * length)[:length])
            runs = []
            for _ in range(3):
                parser, began = _parser(subject, _PLAIN), time.thread_time()
                _read(parser, pieces)
                runs.append(time.thread_time() - began)
            times.append(min(runs))
        if times[1] > max(_LEAST_SECONDS, _MOST_GROWTH * times[0]):
            sizes = f"{_LENGTHS[0]} characters take {times[0]:.3f} s, {_LENGTHS[1]} {times[1]:.3f} s"
            return Finding.failed("quadratic", f"{text!r:.60}...", sizes)
    return Finding()
