"""The driver of tool parsers: content outside, calls where a mark or the output's beginning may open one."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hardpoint.parsers.calls import Call, function_name, read_call, says_nothing
from hardpoint.parsers.steps import (
    Arguments,
    Brackets,
    CallHead,
    Literal,
    Look,
    QuotedText,
    TextMatcher,
    any_of,
    begun_mark,
)
from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)


@dataclass(frozen=True)
class Part:
    """More of the JSON object of a call's arguments. The first part has the call's name; the last one says so."""

    arguments: str
    name: str | None = None
    is_last: bool = False


Block = Generator[TextMatcher | Part | Sequence[Call], str, bool]
"""A call being read: it yields the steps to take and is sent their values, and yields the calls once they are certain.

The step Arguments is a call of its own, which begins with the step and ends with it. Other calls are yielded whole, or
in parts with steps between them, of which QuotedText adds to the arguments what it takes. The block returns whether the
text taken since the last call or part belongs to it, and may say so earlier with an empty list; text that does not is
content, as is the text of a step that does not come to its end.
"""


def object_call(is_known: Callable[[str], bool] = lambda name: True) -> Block:
    """A JSON object with ``name`` and ``arguments``, in this order passed on as they come; see read_call.

    A text is a call where ``is_known`` knows its name.
    """
    head = CallHead()
    text = yield head
    if head.name is None:
        call = read_call(text)
        if call is None or not is_known(call.name):
            return False
        yield [call]
        return True
    if not is_known(head.name):
        yield Brackets(opened="{")
        return False
    yield Arguments(head.name)
    if (yield Literal("}", ",")) == "," and not says_nothing((yield Brackets(opened="{"))):
        return False
    yield []
    return True


def named_call(name: str) -> Block:
    """The JSON object of the arguments of a call of ``name``, passed on as it comes."""
    known = function_name(name)
    if known is None or (yield Look()) != "{":
        return False
    yield Arguments(known)
    return True


class MarkedToolParser(ToolParser):
    """A tool parser that says with ``block`` how a call goes on behind one of its ``openings``.

    A call may also begin with a character of ``bare``, at the beginning of the output and behind another call. Blanks
    next to a call are dropped, unless there is content on their other side. A call is reported when all of it is read,
    and one that breaks off is content; but from Arguments or a first Part on it is reported as it comes, and may break
    off.
    """

    openings: ClassVar[tuple[str, ...]]
    bare: ClassVar[str] = ""

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        self._pattern: re.Pattern[str] | None = any_of(self.openings) if self.openings else None
        self._held = ""
        self._block: Block | None = None
        self._step: TextMatcher = Look()
        self._raw: list[str] = []
        self._events: list[ParserEvent] = []
        self._num_calls = 0
        self._is_calling = False
        self._is_fresh = True
        self._is_bare = False
        self._blanks: list[str] = []

    @abstractmethod
    def block(self, opening: str) -> Block:
        """Read what follows ``opening``, which is empty for a call without one."""

    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text."""
        text, pos = self._held + delta, 0
        self._held = ""
        while pos < len(text):
            if self._block is None:
                pos = self._outside(text, pos)
            else:
                text, pos = self._inside(text, pos)
        return self._taken_events()

    def finish(self) -> list[ParserEvent]:
        """Turn what is open into content."""
        self._give_up()
        self._content(self._held)
        if not (self._num_calls and self._is_fresh):
            self._emit("".join(self._blanks))
        self._held, self._blanks = "", []
        return self._taken_events()

    def _outside(self, text: str, pos: int) -> int:
        """Take content up to where a block begins; returns where that is read on."""
        if self._is_fresh and self.bare:
            start, done = Look().feed(text, pos)
            self._content(text[pos:start])
            pos = start
            if not done:
                return pos
            if text[pos] in self.bare:
                self._is_bare = True
                self._begin("")
                return pos
        found = self._pattern.search(text, pos) if self._pattern else None
        if found is not None:
            self._content(text[pos : found.start()])
            self._raw.append(found[0])
            self._begin(found[0])
            return found.end()
        rest = text[max(pos, len(text) - 64) :]
        held = begun_mark(rest, self.openings) if self.openings else 0
        self._content(text[pos : len(text) - held])
        self._held = text[len(text) - held :]
        return len(text)

    def _begin(self, opening: str) -> None:
        self._block = self.block(opening)
        self._go_on(None)

    def _inside(self, text: str, pos: int) -> tuple[str, int]:
        """Let the block's step take text; returns the text and where it is read on."""
        end, done = self._step.feed(text, pos)
        if isinstance(self._step, Arguments | QuotedText):
            self._arguments(self._step.take())
            self._raw = [self._step.held]
        elif end < 0:  # the step gives back what came with an earlier piece
            assert pos == 0, "a step that began in this piece gives back no more than it took"
            raw = "".join(self._raw)
            self._raw = [raw[:end]]
            text, pos, end = raw[end:] + text, 0, 0
        elif end < pos:
            raw = "".join(self._raw)
            self._raw = [raw[: end - pos]]
        else:
            self._raw.append(text[pos:end])
        if done is not None:
            self._go_on(self._step.value if done else None, failed=not done)
        return text, end

    def _go_on(self, value: str | None, failed: bool = False) -> None:
        """Send the block its value and take what it yields, up to the next step."""
        assert self._block is not None
        if isinstance(self._step, Arguments):
            self._end_call()
        if failed:
            self._give_up()
            return
        try:
            wanted = next(self._block) if value is None else self._block.send(value)
            while isinstance(wanted, Part | Sequence):
                parts = [wanted] if isinstance(wanted, Part) else [Part(c.arguments, c.name, True) for c in wanted]
                for part in parts:
                    self._add(part)
                self._raw.clear()
                wanted = next(self._block)
            if isinstance(wanted, Arguments):
                self._begin_call(wanted.name)
                self._raw.clear()
            self._step = wanted
        except StopIteration as returned:
            if returned.value:
                self._raw.clear()
            self._give_up()

    def _give_up(self) -> None:
        """Leave the block; the text that it took is content. Text that is no call where a call needs no mark never
        becomes one."""
        self._end_call()
        self._block = None
        self._is_fresh, self._is_bare = self._is_fresh and not self._is_bare, False
        raw, self._raw = "".join(self._raw), []
        self._content(raw)

    def _add(self, part: Part) -> None:
        if part.name is not None:
            self._begin_call(part.name)
        self._arguments(part.arguments)
        if part.is_last:
            self._end_call()

    def _arguments(self, more: str) -> None:
        if more:
            self._events.append(ToolCallDelta(self._num_calls - 1, more))

    def _begin_call(self, name: str) -> None:
        self._blanks.clear()
        self._is_fresh, self._is_bare = True, False
        self._events.append(ToolCallStart(self._num_calls, self.make_id(), name))
        self._num_calls, self._is_calling = self._num_calls + 1, True

    def _end_call(self) -> None:
        if self._is_calling:
            self._events.append(ToolCallEnd(self._num_calls - 1))
            self._is_calling = False

    def _content(self, text: str) -> None:
        if self._is_fresh and (not text or text.isspace()):
            self._blanks.append(text)
            return
        self._emit("".join(self._blanks) + text)
        self._is_fresh = False
        self._blanks.clear()

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _taken_events(self) -> list[ParserEvent]:
        """The events since the last time, neighbouring content joined."""
        events, self._events = self._events, []
        joined: list[ParserEvent] = []
        texts: list[str] = []
        for event in events:
            if isinstance(event, ContentDelta):
                texts.append(event.text)
                continue
            if texts:
                joined.append(ContentDelta("".join(texts)))
                texts.clear()
            joined.append(event)
        return [*joined, ContentDelta("".join(texts))] if texts else joined
