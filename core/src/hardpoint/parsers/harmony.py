"""The output of gpt-oss: messages in channels, in OpenAI's harmony format.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>``. A call is a
message with a recipient, ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``; the
recipient may stand before the channel, behind the role. A message on ``commentary`` without one is for the user
(cookbook.openai.com/articles/openai-harmony). The prompt ends with ``<|start|>assistant``, and ``<|call|>`` and
``<|return|>`` end the output, so that neither need be in the text.

The reasoning parser takes the messages apart; those with a recipient it leaves as they are, for the tool parser.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar
from typing import Literal as OneOf

from hardpoint.parsers.lark import functions_of, grammar, json_of, literal, parameters, quoted
from hardpoint.parsers.marked import Block, MarkedToolParser, named_call
from hardpoint.parsers.steps import Literal, Short, any_of, begun_mark
from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ReasoningDelta,
    ReasoningParser,
    ReasoningParserWorkload,
    StructuredOutput,
    ToolParserWorkload,
)

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_BARE = re.compile(r"\s*(t|to|to=\S*\s*)?")
_LONGEST_HEADER = 512

_Kind = OneOf["header", "reasoning", "content", "call", "between"]


def _is_harmony(template: str | None) -> bool:
    return template is not None and _CHANNEL in template and _MESSAGE in template


class HarmonyToolParser(MarkedToolParser):
    """Messages with a recipient and a JSON object; ``functions.`` in front of a name is dropped."""

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = (_START, _CHANNEL)
    bare: ClassVar[str] = "t"

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The marks of channel and message."""
        return _is_harmony(workload.chat_template)

    def block(self, opening: str) -> Block:
        header = opening
        if not opening:
            header = yield Literal("to=")
        header += yield Short(_MESSAGE, forbidden=_ENDS, limit=_LONGEST_HEADER)
        recipient = _RECIPIENT.search(header)
        if recipient is None or not (yield from named_call(recipient[1].removeprefix("functions."))):
            return False
        yield Literal(*_ENDS)
        return True

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        """One call; reasoning may come before it."""
        functions = functions_of(self.args, name)
        start, channel, constrain, message = (literal(self.args, mark) for mark in _MARKS[:4])
        head = f'{channel} "commentary to=functions."'
        body = f'" " {constrain} "json" {message}'
        calls = [f"{head} {quoted(each)} {body} arguments_{i}" for i, each in enumerate(functions)]
        rules = {f"arguments_{i}": json_of(parameters(each)) for i, each in enumerate(functions.values())}
        return grammar(
            "reasoning? call",
            reasoning=f'{channel} "analysis" {message} /(.|\\n)*/ {literal(self.args, "<|end|>")} {start} "assistant"',
            call=" | ".join(calls),
            **rules,
        )


class HarmonyReasoningParser(ReasoningParser):
    """``analysis`` is reasoning, other channels are content, without the marks around them."""

    needs_special_tokens: ClassVar[bool] = True

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        self._pattern = any_of(_MARKS)
        self._held = ""
        self._header: list[str] = []
        self._header_size = 0
        self._kind: _Kind = "between"
        self._is_first = True
        self._events: list[ParserEvent] = []

    @classmethod
    def recognizes(cls, workload: ReasoningParserWorkload) -> bool:
        """The marks of channel and message."""
        return _is_harmony(workload.chat_template)

    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text."""
        text, pos = self._held + delta, 0
        while found := self._pattern.search(text, pos):
            self._text(text[pos : found.start()])
            self._mark(found[0])
            pos = found.end()
        rest = text[pos:]
        held = begun_mark(rest[-16:], _MARKS)
        self._text(rest[: len(rest) - held])
        self._held = rest[len(rest) - held :]
        return self._taken_events()

    def finish(self) -> list[ParserEvent]:
        """A header without a message is content."""
        self._text(self._held)
        self._held = ""
        self._drop_header()
        return self._taken_events()

    def delayed(self, structure: StructuredOutput) -> StructuredOutput:
        """The answer is what stands in the channel ``final``. A forced call's grammar has its own reasoning."""
        if structure.after or "commentary to=functions." in structure.value:
            return structure
        return replace(structure, after=f"{_CHANNEL}final{_MESSAGE}")

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._is_first:  # a header whose first mark stands in the prompt
            self._take_header(text)
            if not _BARE.fullmatch("".join(self._header)):
                self._drop_header()
        elif self._kind == "header":
            self._take_header(text)
        else:
            self._emit(text)

    def _mark(self, mark: str) -> None:
        if self._is_first:
            bare = "".join(self._header)
            self._is_first = False
            if "to=" in bare and mark in (_CHANNEL, _CONSTRAIN, _MESSAGE):
                self._kind = "header"
            else:
                self._drop_header()
        if self._kind == "header" and mark == _MESSAGE:
            self._begin_message()
        elif mark in (_START, _CHANNEL) and not (self._kind == "header" and mark == _CHANNEL):
            self._drop_header()
            self._kind = "header"
            self._take_header(mark)
        elif self._kind == "header" and mark in (_CHANNEL, _CONSTRAIN):
            self._take_header(mark)
        elif mark in _ENDS and self._kind != "header":
            if self._kind in ("call", "between"):
                self._emit(mark)
            self._kind = "between"
        else:
            self._drop_header()
            self._emit(mark)

    def _begin_message(self) -> None:
        header = "".join(self._header)
        channel = _CHANNEL_NAME.search(header)
        self._header, self._header_size = [], 0
        if _RECIPIENT.search(header) or channel is None:
            self._kind = "call"
            self._emit(header + _MESSAGE)
        else:
            self._kind = "reasoning" if channel[1] == "analysis" else "content"

    def _take_header(self, text: str) -> None:
        self._header.append(text)
        self._header_size += len(text)
        if self._header_size > _LONGEST_HEADER:
            self._drop_header()

    def _drop_header(self) -> None:
        """Treat as content the text that looked like a header."""
        header, self._header, self._header_size = "".join(self._header), [], 0
        self._is_first = False
        if self._kind == "header":
            self._kind = "between"
        self._emit(header)

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text) if self._kind == "reasoning" else ContentDelta(text))

    def _taken_events(self) -> list[ParserEvent]:
        events, self._events = self._events, []
        return events
