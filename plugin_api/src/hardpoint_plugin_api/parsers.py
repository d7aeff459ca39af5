"""Parsers of a model's output: they separate reasoning, tool calls and content.

A parser is fed the output's text in pieces of any length, and returns events. No text that a model writes makes it
raise or lose text: text that is no tool call is content, marks included. The events, with neighbouring deltas joined,
do not depend on how the text was cut. Total work is linear in the length of the text.

An output passes a reasoning parser first; the content that it returns is fed to a tool parser.
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
    """More of the model's reasoning. ``text`` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of the tool ``name`` begins. ``index`` counts the calls of an output from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call's arguments. All deltas together are the text of a JSON object.

    A parser may pass the arguments on as the model writes them: they may then be cut off or invalid.
    """

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


ParserEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
"""The events of parsers."""


@dataclass(frozen=True, kw_only=True)
class ParserArgs:
    """The arguments of a parser's constructor; each output has a parser of its own.

    ``tools``: the request's tools, in the form of OpenAI's chat completions (``{"type": "function", "function":
    {"name": ..., "parameters": JSON schema}}``). ``prompt``: the text before the output, or its end.
    ``special_tokens``: the ids of the tokenizer's added tokens, by text.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str = ""
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """The functions of the tools, by name. Tools that are no functions are left out."""
        found = (tool.get("function") for tool in self.tools if isinstance(tool, Mapping))
        return {str(f["name"]): f for f in found if isinstance(f, Mapping) and isinstance(f.get("name"), str)}


class ToolParser(ABC):
    """Finds tool calls in one output. A call is ToolCallStart, any number of ToolCallDelta, ToolCallEnd.

    ``needs_special_tokens``: calls are marked by special tokens, which must be kept in the text
    (``skip_special_tokens`` off).
    """

    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, args: ParserArgs) -> None:
        self.args = args

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """Return True where models with this chat template certainly write calls in this syntax. Default: False."""
        return False

    @classmethod
    def supports(cls, workload: ToolParserWorkload, device: DeviceInfo) -> list[Reason]:
        """Return a reason against a chat template that is not recognized; none for a parser that the user named."""
        return _unrecognized(cls.recognizes(workload)) if workload.chat_template is not None else []

    @abstractmethod
    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text, and return the events that are certain now. Must not be called after ``finish``."""

    @abstractmethod
    def finish(self) -> list[ParserEvent]:
        """End the output, and return the remaining events. Must be called once."""

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        """Return a constraint that makes the model call a tool in this syntax: ``name``, or any tool of ``args.tools``.

        ``parallel``: several calls may follow each other, if the syntax has that. None, the default: not supported.
        """
        return None

    def make_id(self) -> str:
        """Return a unique id for a call. Override it where the chat template requires a certain form."""
        return f"call_{uuid.uuid4().hex[:24]}"


class ReasoningParser(ABC):
    """Separates a model's reasoning from its answer. Events are ReasoningDelta and ContentDelta.

    Content may hold tool calls as the model wrote them. ``needs_special_tokens`` is as in ToolParser. ``opening`` and
    ``ending``: the texts before and after reasoning, if it has such, for ``opening`` and ``after`` of StructuredOutput.
    """

    needs_special_tokens: ClassVar[bool] = False
    opening: ClassVar[str] = ""
    ending: ClassVar[str] = ""

    def __init__(self, args: ParserArgs) -> None:
        self.args = args

    @classmethod
    def recognizes(cls, workload: ReasoningParserWorkload) -> bool:
        """Return True where models with this chat template certainly mark their reasoning so. Default: False."""
        return False

    @classmethod
    def supports(cls, workload: ReasoningParserWorkload, device: DeviceInfo) -> list[Reason]:
        """Return a reason against a chat template that is not recognized; none for a parser that the user named."""
        return _unrecognized(cls.recognizes(workload)) if workload.chat_template is not None else []

    @abstractmethod
    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text, and return the events that are certain now. Must not be called after ``finish``."""

    @abstractmethod
    def finish(self) -> list[ParserEvent]:
        """End the output, and return the remaining events. Must be called once."""

    def delayed(self, structure: StructuredOutput) -> StructuredOutput:
        """Return the constraint applied to the answer only, with free reasoning before it. Default: no reasoning is
        allowed.
        """
        return structure


def _unrecognized(is_recognized: bool) -> list[Reason]:
    return [] if is_recognized else [Reason("template", "the model's chat template does not show its syntax")]
