"""Reasoning between tags at an output's beginning.

``<think>...</think>`` (Qwen3, DeepSeek R1, GLM-4.5: their chat templates); ``[THINK]...[/THINK]``, two special tokens,
of Mistral's Magistral (model card of mistralai/Magistral-Small-2507). Some templates write the opening tag at the end
of the prompt, so that the output begins inside; where they write both tags there is no reasoning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hardpoint.parsers.steps import Look, begun_mark
from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ReasoningDelta,
    ReasoningParser,
    ReasoningParserWorkload,
    StructuredOutput,
)

_MOST_BLANKS = 64
"""Most blanks in front of an opening tag."""


class ThinkReasoningParser(ReasoningParser):
    """``<think>`` tags. Line breaks behind a tag belong to it; reasoning without its end is reasoning all the same."""

    needs_special_tokens: ClassVar[bool] = True
    opening: ClassVar[str] = "<think>"
    ending: ClassVar[str] = "</think>"
    begins_inside: ClassVar[bool] = False

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        prompt = args.prompt.rstrip()
        self._is_over = prompt.endswith(self.ending)
        self._is_inside = not self._is_over and (self.begins_inside or prompt.endswith(self.opening))
        self._is_behind_tag = self._is_inside
        self._may_open = not self._is_over
        self._held = ""

    @classmethod
    def recognizes(cls, workload: ReasoningParserWorkload) -> bool:
        """The closing tag: templates drop what stands before it from earlier messages."""
        return cls.ending in (workload.chat_template or "")

    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text."""
        text, events = self._held + delta, list[ParserEvent]()
        self._held = ""
        if self._may_open:
            text = self._open(text)
            if self._may_open:
                return events
        if self._is_inside:
            text = self._inside(text, events)
        if not self._is_inside:
            self._emit(text, events)
        return events

    def finish(self) -> list[ParserEvent]:
        """Release the text that was held back."""
        self._may_open = False
        events: list[ParserEvent] = []
        self._emit(self._held, events)
        return events

    def delayed(self, structure: StructuredOutput) -> StructuredOutput:
        """Free up to the closing tag, where the output begins inside or with the opening tag."""
        if self._is_over or structure.after:
            return structure
        return replace(structure, after=self.ending, opening="" if self._is_inside else self.opening)

    def _open(self, text: str) -> str:
        """Skip the opening tag, where the output begins with it; holds back what may become one."""
        start, _ = Look().feed(text, 0)
        rest = text[start:]
        if start <= _MOST_BLANKS and len(rest) < len(self.opening) and self.opening.startswith(rest):
            self._held = text
            return ""
        self._may_open = False
        if start > _MOST_BLANKS or not rest.startswith(self.opening):
            return text
        self._is_inside = self._is_behind_tag = True
        return rest[len(self.opening) :]

    def _inside(self, text: str, events: list[ParserEvent]) -> str:
        """Take reasoning; return the text behind it."""
        at = text.find(self.ending)
        if at < 0:
            held = begun_mark(text[-len(self.ending) :], [self.ending])
            self._emit(text[: len(text) - held], events)
            self._held = text[len(text) - held :]
            return ""
        self._emit(text[:at], events)
        self._is_inside, self._is_behind_tag = False, True
        return text[at + len(self.ending) :]

    def _emit(self, text: str, events: list[ParserEvent]) -> None:
        if self._is_behind_tag:
            text = text.lstrip("\r\n")
            self._is_behind_tag = not text
        if text:
            events.append(ReasoningDelta(text) if self._is_inside else ContentDelta(text))


class DeepSeekR1ReasoningParser(ThinkReasoningParser):
    """The same, for models that write no opening tag, nor does their template: the output begins inside."""

    begins_inside: ClassVar[bool] = True

    @classmethod
    def recognizes(cls, workload: ReasoningParserWorkload) -> bool:
        """False: no chat template shows these tags."""
        return False


class MistralReasoningParser(ThinkReasoningParser):
    """``[THINK]`` tags."""

    opening: ClassVar[str] = "[THINK]"
    ending: ClassVar[str] = "[/THINK]"
