"""Parsers of a model's output: what is reasoning, what is a call of a tool, and what is content.

A parser is fed the output's text as it comes, in pieces cut anywhere, and answers with events. Nothing that a model
writes makes it raise or lose text: what is no tool call comes out as content, marks and all. The events, with
neighbouring deltas joined, do not depend on how the text was cut. Work is linear in the text.

An output passes through a reasoning parser first; the content that it yields is fed to a tool parser.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import ReasoningParserWorkload, ToolParserWorkload
from hardpoint_plugin_api.structured import StructuredOutput


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer. ``text`` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model says to itself. ``text`` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of the tool ``name`` begins. ``index`` counts the calls of an output from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call's arguments: together they are the text of a JSON object.

    A parser may pass them on as the model writes them: then they may break off, and hold the model's mistakes.
    """

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


ParserEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
"""What parsers answer with."""


@dataclass(frozen=True, kw_only=True)
class ParserArgs:
    """What a parser is constructed with, once for each output.

    ``tools`` are those of the request, in the form of OpenAI's chat completions (``{"type": "function", "function":
    {"name": ..., "parameters": JSON schema}}``). ``prompt`` is the text that the output continues, or its end.
    ``special_tokens`` has the ids of the tokenizer's added tokens by their text, special ones among them.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str = ""
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """The tools' functions by name; what is no function is left out."""
        found = (tool.get("function") for tool in self.tools if isinstance(tool, Mapping))
        return {str(f["name"]): f for f in found if isinstance(f, Mapping) and isinstance(f.get("name"), str)}


class ToolParser(ABC):
    """Finds tool calls in one output. A call is ToolCallStart, ToolCallDelta (any number), ToolCallEnd.

    ``needs_special_tokens`` says that calls are marked by special tokens, which must then be left in the text that is
    fed (``skip_special_tokens`` off).
    """

    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, args: ParserArgs) -> None:
        self.args = args

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """Say whether a model with this chat template surely writes calls in this syntax. Default: never sure."""
        return False

    @classmethod
    def supports(cls, workload: ToolParserWorkload, device: DeviceInfo) -> list[Reason]:
        """Nothing is against a parser that was asked for by name, where the workload holds no template."""
        return _unrecognized(cls.recognizes(workload)) if workload.chat_template is not None else []

    @abstractmethod
    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text; return what is certain now. Must not be called after ``finish``."""

    @abstractmethod
    def finish(self) -> list[ParserEvent]:
        """The output has ended: return everything held back. To be called once."""

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        """What makes a model call a tool in this syntax: the tool ``name``, or any of those in ``args.tools``.

        With ``parallel`` several calls may follow each other, where the syntax has that. None where the parser cannot
        say it, the default.
        """
        return None

    def make_id(self) -> str:
        """An id for a call, unlike all others. A parser whose chat template asks for a certain form overrides this."""
        return f"call_{uuid.uuid4().hex[:24]}"


class ReasoningParser(ABC):
    """Tells what a model says to itself from its answer: events are ReasoningDelta and ContentDelta.

    Content may hold tool calls, as the model wrote them. ``needs_special_tokens`` is as in ToolParser. ``opening`` and
    ``ending`` are the texts around reasoning, where it has such, for StructuredOutput's ``opening`` and ``after``.
    """

    needs_special_tokens: ClassVar[bool] = False
    opening: ClassVar[str] = ""
    ending: ClassVar[str] = ""

    def __init__(self, args: ParserArgs) -> None:
        self.args = args

    @classmethod
    def recognizes(cls, workload: ReasoningParserWorkload) -> bool:
        """Say whether a model with this chat template surely marks its reasoning so. Default: never sure."""
        return False

    @classmethod
    def supports(cls, workload: ReasoningParserWorkload, device: DeviceInfo) -> list[Reason]:
        """Nothing is against a parser that was asked for by name, where the workload holds no template."""
        return _unrecognized(cls.recognizes(workload)) if workload.chat_template is not None else []

    @abstractmethod
    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text; return what is certain now. Must not be called after ``finish``."""

    @abstractmethod
    def finish(self) -> list[ParserEvent]:
        """The output has ended: return everything held back. To be called once."""

    def delayed(self, structure: StructuredOutput) -> StructuredOutput:
        """The same constraint on the answer, with reasoning before it left free. Default: no reasoning is allowed."""
        return structure


def _unrecognized(is_recognized: bool) -> list[Reason]:
    return [] if is_recognized else [Reason("template", "the model's chat template does not show its syntax")]
