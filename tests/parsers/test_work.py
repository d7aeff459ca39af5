"""The work of a parser grows as its text does. Counted, since seconds depend on who else uses the machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from tests.parsers.reading import REASONING_PARSERS, TOOL_PARSERS, opened
from tests.support.alternating import alternating

_SHORT, _TIMES = 2000, 3
"""Letters of the shorter text, and how many times as long the other is. Quadratic work would be 9 times as much."""
_TEXTS = {
    "prose": "a whale ",
    "open bracket": "[",
    "open brace": '{"a":',
    "open mark": "<tool_call",
    "marks that end nothing": "</tool_call></think>",
    "an angle": "<",
    "quotes": '"\\',
}
_CALLS = {
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>",
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "',
    "llama3_json": '{"name": "weather", "parameters": {"city": "',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "',
    "pythonic": "[weather(city='",
}


def work(feed: Callable[[str], object], text: str) -> int:
    """Calls that feeding ``text`` letter by letter takes, each of which counts for every letter that it may look at.

    A method of a text, or of a pattern, may look at the whole of it: at the longest text that its caller holds.
    """
    total = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal total
        if event == "call":
            total += 1
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            if isinstance(owner, str):
                total += 1 + len(owner)
            elif isinstance(owner, re.Pattern):
                total += 1 + max((len(x) for x in frame.f_locals.values() if isinstance(x, str)), default=0)

    sys.setprofile(count)
    try:
        for letter in text:
            feed(letter)
    finally:
        sys.setprofile(None)
    return total


def growth(make: Callable[[], Callable[[str], object]], text: str, before: str = "") -> float:
    """How many times as much work ``_TIMES`` as long a text is."""
    amounts = []
    for length in (_SHORT, _SHORT * _TIMES):
        feed = make()
        for letter in before:
            feed(letter)
        amounts.append(work(feed, (text * length)[:length]))
    return amounts[1] / amounts[0]


_PARSERS = {t: (t, "none") for t in TOOL_PARSERS} | {f"none-{r}": ("none", r) for r in REASONING_PARSERS}


@pytest.mark.parametrize(("parsers", "text"), alternating(_PARSERS, _TEXTS))
def test_work_grows_as_the_text_does(parsers: tuple[str, str], text: str) -> None:
    """The conformance kit counts each parser's work, too, by other texts."""
    assert growth(lambda: opened(*parsers).feed, text) < 2 * _TIMES


@pytest.mark.parametrize("text", ["a whale ", "ж", "<", "1"])
@pytest.mark.parametrize("tool", _CALLS)
def test_so_does_that_of_a_calls_arguments(tool: str, text: str) -> None:
    assert growth(lambda: opened(tool).feed, text, _CALLS[tool]) < 2 * _TIMES


@pytest.mark.parametrize("look", [lambda held: held.find("</end>"), lambda held: re.compile("</end>").search(held)])
def test_work_that_grows_faster_is_seen(look: Callable[[str], object]) -> None:
    class Rescans:
        held = ""

        def feed(self, piece: str) -> None:
            self.held += piece
            held = self.held
            look(held)

    assert growth(lambda: Rescans().feed, "a") > 2.5 * _TIMES
