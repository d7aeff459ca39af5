"""Samples of outputs for the trials of parsers: text as a model writes it, and its content, calls and reasoning.

Core's samples are those of its own parsers, by their names. A plugin brings samples of its syntax by the hook
``hardpoint_conformance``, see docs/conformance.md.
"""

# ruff: noqa: RUF001  # DeepSeek's marks have wide bars
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint_plugin_api import ContentDelta, ReasoningDelta


@dataclass(frozen=True)
class SampleCall:
    """One call: the tool's name, and the text of its arguments with all deltas joined."""

    name: str
    arguments: str = "{}"


Said = ContentDelta | ReasoningDelta | SampleCall


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool in the form of OpenAI's chat completions; ``properties`` are JSON schemas of required arguments."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (tool("weather", city={"type": "string"}, days={"type": "integer"}), tool("clock"))
"""The tools of core's samples."""


@dataclass(frozen=True)
class ParserSample:
    """An output and its meaning.

    ``said`` are the parts in their order; neighbouring deltas of one kind are one part. ``tools`` and ``prompt`` are
    those of ``ParserArgs``. ``forced`` says that the text is one of those which the parser's ``constraint`` must admit:
    calls alone, as a model writes them that is made to call a tool.
    """

    name: str
    text: str
    said: tuple[Said, ...]
    tools: Sequence[Mapping[str, Any]] = TOOLS
    prompt: str = ""
    forced: bool = False


_ARGUMENTS = '{"city": "Paris", "days": 2}'
_CALLS = (SampleCall("weather", _ARGUMENTS), SampleCall("clock"))
_BEGIN, _END, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"
_SEP, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {_ARGUMENTS}}}\n</tool_call>'
_HERMES_CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
_GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
_DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
_KIMI_BEGIN = "<|tool_calls_section_begin|>"
_KIMI = (
    f"{_KIMI_BEGIN}<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>"
    "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)


def _calls(name: str, text: str, content: str = "", *, forced: bool = False) -> ParserSample:
    """Both calls behind ``content``."""
    return ParserSample(name, text, (*([ContentDelta(content)] if content else []), *_CALLS), forced=forced)


def _none(name: str, text: str) -> ParserSample:
    """No call: all of the text is content."""
    return ParserSample(name, text, (ContentDelta(text),))


TOOL_SAMPLES: dict[str, tuple[ParserSample, ...]] = {
    "hermes": (
        _calls("calls", f"Let me see.\n{_HERMES}\n{_HERMES_CLOCK}\n", "Let me see.\n"),
        _calls("cut off behind the object", f"{_HERMES}\n{_HERMES_CLOCK.removesuffix('</tool_call>')}"),
        _calls("forced", f"{_HERMES}\n{_HERMES_CLOCK}", forced=True),
        _none("no call", 'Write <tool_call> first: {} and [], <tool_call>{"name": "clock", "note": "keep me"}'),
    ),
    "llama3_json": (
        _calls("objects", f'{{"name": "weather", "parameters": {_ARGUMENTS}}}; {{"name": "clock"}}'),
        _calls(
            "with its tag",
            f'So: <|python_tag|>{{"name": "weather", "parameters": {_ARGUMENTS}}};{{"name":"clock","parameters":{{}}}}',
            "So: ",
        ),
        ParserSample("forced", f'{{"name": "weather", "parameters": {_ARGUMENTS}}}', _CALLS[:1], forced=True),
        _none("no call", '{"name": "Bob", "parameters": {}}'),
    ),
    "mistral": (
        _calls(
            "array",
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_ARGUMENTS}, "id": "123456789"}}, '
            '{"name": "clock", "arguments": {}}]',
        ),
        _calls("since v11", f"Hm.[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]clock[ARGS]{{}}", "Hm."),
        _calls(
            "with ids",
            f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{_ARGUMENTS}[TOOL_CALLS]clock[CALL_ID]1[ARGS]{{}}",
        ),
        _calls("marks skipped", f"[TOOL_CALLS]weather{_ARGUMENTS}[TOOL_CALLS]clock{{}}"),
        _calls(
            "forced",
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {_ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]',
            forced=True,
        ),
        _none("no call", "[TOOL_CALLS] are what I make"),
    ),
    "glm": (
        _calls("calls", f"Well:\n{_GLM}\n<tool_call>clock\n</tool_call>", "Well:\n"),
        _calls("in one line", _GLM.replace("\n", "") + "<tool_call>clock</tool_call>"),
        _none("no call", "<tool_call>weather<arg_key>city</arg_key></tool_call>"),
    ),
    "deepseek": (
        _calls(
            "v3",
            f"{_BEGIN}{_CALL}function{_SEP}weather\n```json\n{_ARGUMENTS}\n```{_CALL_END}\n"
            f"{_CALL}function{_SEP}clock\n```json\n{{}}\n```{_CALL_END}{_END}",
        ),
        _calls(
            "v3.1",
            f"Sure.{_BEGIN}{_CALL}weather{_SEP}{_ARGUMENTS}{_CALL_END}{_CALL}clock{_SEP}{{}}{_CALL_END}{_END}",
            "Sure.",
        ),
        _none("no call", f"{_BEGIN}{_CALL}function{_SEP}weather{_ARGUMENTS}{_CALL_END}{_END}"),
    ),
    "dsml": (
        _calls("calls", f"Sure.\n\n{_DSML}", "Sure.\n\n"),
        _calls("in one line", _DSML.replace("\n", "")),
        _none("no call", '<｜DSML｜function_calls>\n<｜DSML｜parameter name="city" string="true">'),
    ),
    "kimi": (
        _calls("calls", f"Sure.{_KIMI}", "Sure."),
        _calls("forced", _KIMI, forced=True),
        _none("no call", f"{_KIMI_BEGIN}<|tool_call_begin|>weather<|tool_call_argument_begin|>{{}}<|tool_call_end|>"),
    ),
    "harmony": (
        _calls(
            "the channel first",
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_ARGUMENTS}<|call|>"
            "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        ),
        _calls(
            "the recipient first",
            f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{_ARGUMENTS}<|call|>"
            "<|start|>assistant<|channel|>commentary to=functions.clock<|message|>{}",
        ),
        ParserSample(
            "forced",
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_ARGUMENTS}",
            _CALLS[:1],
            forced=True,
        ),
        _none("no call", "<|channel|>final<|message|>{}"),
    ),
    "pythonic": (
        _calls("a list", '[weather(city="Paris", days=2), clock()]'),
        _calls("with its tags", '<|python_start|>[weather(city="Paris", days=2), clock()]<|python_end|>'),
        _none("no call", "[weather](https://example.org) says so"),
    ),
}
"""Core's tool parsers, by name."""

_HM, _YES = ReasoningDelta("Hm."), ContentDelta("Yes.")

REASONING_SAMPLES: dict[str, tuple[ParserSample, ...]] = {
    "think": (
        ParserSample("both tags", "<think>\nHm.\n</think>\n\nYes.", (ReasoningDelta("Hm.\n"), _YES)),
        ParserSample("opened by the prompt", "Hm.</think>Yes.", (_HM, _YES), prompt="<|assistant|><think>\n"),
        ParserSample("closed by the prompt", "Yes.", (_YES,), prompt="<think>\n\n</think>\n\n"),
        _none("no reasoning", "I write <think> and </think>."),
        ParserSample("without an end", "<think>Hm. </thin", (ReasoningDelta("Hm. </thin"),)),
    ),
    "deepseek_r1": (ParserSample("begun inside", "Hm.</think>Yes.", (_HM, _YES)),),
    "mistral": (ParserSample("both tags", "[THINK]Hm.[/THINK]Yes.", (_HM, _YES)),),
    "harmony": (
        ParserSample(
            "channels",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
            "<|start|>assistant<|channel|>final<|message|> Yes.<|return|>",
            (_HM, ContentDelta("Well. Yes.")),
        ),
        _none("a message continued", "and so on."),
        _none("a header without a message", "<|channel|>final<|end|>"),
    ),
}
"""Core's reasoning parsers, by name."""
