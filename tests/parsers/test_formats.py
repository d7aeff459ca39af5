"""Examples of each syntax, and their events, however the text is cut."""

# ruff: noqa: RUF001  # DeepSeek's marks have wide bars
from __future__ import annotations

import pytest

from hardpoint.config import EngineConfig
from hardpoint.conformance.families.parser_samples import (
    REASONING_SAMPLES,
    TOOL_SAMPLES,
    ParserSample,
    SampleCall,
)
from hardpoint.parsers import choose_parsers
from hardpoint_plugin_api import ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from tests.parsers.reading import joined, opened, parsers, read

ARGUMENTS = '{"city": "Paris", "days": 2}'
WEATHER = ("call", "weather", ARGUMENTS)
BEGIN, END, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"
SEP, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)


def said(sample: ParserSample) -> list[tuple[str, ...]]:
    """The sample's meaning as ``read`` has it."""
    return [
        ("call", part.name, part.arguments)
        if isinstance(part, SampleCall)
        else ("reasoning" if isinstance(part, ReasoningDelta) else "content", part.text)
        for part in sample.said
    ]


CALLS = {f"{parser}, {sample.name}": (parser, sample) for parser, samples in TOOL_SAMPLES.items() for sample in samples}


@pytest.mark.parametrize(
    ("tool", "reasoning"), [("openai", "openai_gptoss"), ("glm45", "qwen3"), ("llama4_json", "glm47")]
)
def test_names_of_vllm(tool: str, reasoning: str) -> None:
    own = {"openai": "harmony", "glm45": "glm", "llama4_json": "llama3_json", "openai_gptoss": "harmony"}
    assert parsers(tool, reasoning) == parsers(own[tool], own.get(reasoning, "think"))


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize(("parser", "sample"), CALLS.values(), ids=CALLS)
def test_calls(parser: str, sample: ParserSample, size: int) -> None:
    pieces = [sample.text[i : i + size] for i in range(0, len(sample.text), size)]
    assert read(opened(parser), pieces) == said(sample)


NO_CALLS = {
    "plain": ("hermes", "Tags are <b>bold</b>, 1 < 2, {} and []."),
    "blanks": ("hermes", " \n\n"),
    "the tag in prose": ("hermes", "Write <tool_call> first."),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "arguments that are no object": ("hermes", '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>'),
    "members that would be lost": ("hermes", '<tool_call>{"name": "clock", "note": "keep me"}</tool_call>'),
    "cut off": ("hermes", '<tool_call>\n{"name": "clock", "argum'),
    "not a number in JSON": ("hermes", '<tool_call>{"arguments": {"x": NaN}, "name": "clock"}</tool_call>'),
    "a lone surrogate": ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    "deep": ("hermes", '<tool_call>{"x": ' + '{"x":' * 5000),
    "members that would be lost, and arguments": (
        "hermes",
        '<tool_call>{"name": "clock", "note": "keep me", "arguments": {}}</tool_call>',
    ),
    "an object that names no tool": ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    "an object that names no tool, with a call in it": (
        "llama3_json",
        '{"name": "Bob", "parameters": {"x": "<|python_tag|>{\\"name\\": \\"clock\\"}"}}',
    ),
    "an object in prose": ("llama3_json", 'It is {"name": "clock", "parameters": {}}'),
    "a built-in tool": ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    "a link": ("pythonic", "[weather](https://example.org) says so"),
    "an unknown function": ("pythonic", "[open(file='x')]"),
    "code": ("pythonic", "[weather(city=__import__('os').name)]"),
    "positional": ("pythonic", "[weather('Paris')]"),
    "an infinite number": ("pythonic", "[weather(days=1e999)]"),
    "an empty list": ("pythonic", "[]"),
    "a value without its kind": (
        "dsml",
        '<｜DSML｜function_calls><｜DSML｜invoke name="a"><｜DSML｜parameter name="b">1',
    ),
    "a call without its name": ("dsml", "<｜DSML｜function_calls><｜DSML｜invoke>"),
    "a key without a value": ("glm", "<tool_call>weather<arg_key>city</arg_key></tool_call>"),
    "a value that is cut off": ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>1"),
    "a name that is none": ("glm", "<tool_call>{'weather'}</tool_call>"),
    "no fence": ("deepseek", f"{BEGIN}{CALL}function{SEP}weather{ARGUMENTS}{CALL_END}{END}"),
    "no recipient": ("harmony", "<|channel|>final<|message|>{}"),
    "mistral prose": ("mistral", "[TOOL_CALLS] are what I make"),
    "an array of other things": ("mistral", "[TOOL_CALLS][1, 2]"),
}


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(("parser", "text"), NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_call_is_content(parser: str, text: str, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(opened(parser), pieces) == [("content", text)]


def test_a_call_that_is_broken_leaves_the_next_one_whole() -> None:
    text = f'<tool_call>{{"name": 1}}</tool_call> and {HERMES}'
    assert read(opened("hermes"), [text]) == [("content", '<tool_call>{"name": 1}</tool_call> and '), WEATHER]


def test_a_closing_tag_within_a_text_ends_nothing() -> None:
    call = '<tool_call>{"name": "clock", "arguments": {"x": "</tool_call>\\""}}</tool_call>'
    assert read(opened("hermes"), call) == [("call", "clock", '{"x": "</tool_call>\\""}')]


def test_kimi_names_its_calls_itself() -> None:
    """The chat template repeats ids; of two equal ones the second is counted on."""
    begin, mark = "<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"
    call = "<|tool_call_begin|>functions.clock:{}" + mark + "{{}}<|tool_call_end|>"
    parser = opened("kimi")
    events = [*parser.feed(begin + "".join(call.format(number) for number in (3, 4, 4))), *parser.finish()]
    ids = [event.call_id for event in events if isinstance(event, ToolCallStart)]
    assert ids == ["functions.clock:3", "functions.clock:4", "functions.clock:5"]


def test_arguments_stay_as_written_where_that_is_json() -> None:
    for written, sent in {
        '{"x": 1.0, "y": 1e5}': '{"x": 1.0, "y": 1e5}',
        '{"x": "two\nlines"}': '{"x": "two\\nlines"}',
        '"{\\"x\\": 1}"': '{"x": 1}',
    }.items():
        call = f'<tool_call>{{"name": "clock", "arguments": {written}}}</tool_call>'
        assert read(opened("hermes"), [call]) == [("call", "clock", sent)]


BEGUN = '<tool_call>{"name": "clock", "arguments": '
MALFORMED = {
    "not a number in JSON": ('{"x": NaN}}</tool_call>', '{"x": NaN}', ""),
    "Python": ("{'x': None}}</tool_call>", "{'x': None}", ""),
    "cut off": ('{"x": [1, "tw', '{"x": [1, "tw', ""),
    "cut off at once": ("{", "{", ""),
    "brackets that do not fit": ('{"x": [1}}</tool_call>', '{"x": [1', "}}</tool_call>"),
    "deep": ('{"x":' * 300, '{"x":' * 199 + '{"x":', '{"x":' * 100),
    "members that would be lost": ('{}, "note": "keep me"}</tool_call>', "{}", ', "note": "keep me"}</tool_call>'),
    "a bracket is missing": ("{}</tool_call>", "{}", "</tool_call>"),
    "something behind it": ('{}}<|im_end|>", {}', "{}", '<|im_end|>", {}'),
}


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(("text", "arguments", "content"), MALFORMED.values(), ids=MALFORMED)
def test_arguments_are_passed_on_as_the_model_writes_them(text: str, arguments: str, content: str, size: int) -> None:
    pieces = [(BEGUN + text)[i : i + size] for i in range(0, len(BEGUN + text), size)]
    wanted = [("call", "clock", arguments), *([("content", content)] if content else [])]
    assert read(opened("hermes"), pieces) == wanted


PIECEWISE = {
    "hermes": ("hermes", '<tool_call>\n{"name": "weather", "arguments": '),
    "hermes, with an id": ("hermes", '<tool_call>\n{"id": "a", "type": "function", "name":"weather","arguments" :'),
    "llama": ("llama3_json", '{"name": "weather", "parameters": '),
    "llama, with a type": ("llama3_json", '<|python_tag|>{"type": "function", "name": "weather", "parameters": '),
    "mistral, array": ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": '),
    "mistral, since v11": ("mistral", "[TOOL_CALLS]weather[ARGS]"),
    "deepseek v3": ("deepseek", f"{BEGIN}{CALL}function{SEP}weather\n```json\n"),
    "deepseek v3.1": ("deepseek", f"{BEGIN}{CALL}weather{SEP}"),
    "harmony": ("harmony", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"),
}


@pytest.mark.parametrize(("parser", "head"), PIECEWISE.values(), ids=PIECEWISE)
def test_arguments_come_as_they_are_written(parser: str, head: str) -> None:
    reader = opened(parser)
    events = reader.feed(head)
    for char in ARGUMENTS:
        more = reader.feed(char)
        assert ToolCallDelta(0, char) in more
        events += more
    assert events[-1] == ToolCallEnd(0)
    assert joined([*events, *reader.finish()]) == [WEATHER]


STREAMED = {
    "dsml, a text": (
        "dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">',
        [*'Pa\n<"'],
        '{"city": "Pa\\n<\\"',
    ),
    "dsml, a number": (
        "dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="days" string="false">',
        ["2</｜DSML｜parameter>\n"],
        '{"days": 2',
    ),
    "glm, a text": ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>", [*'Pa\n<"'], '{"city": "Pa\\n<\\"'),
    "glm, its mark begins": ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>", ["a</arg_"], '{"city": "a'),
    "glm, a number": (
        "glm",
        "<tool_call>weather<arg_key>days</arg_key><arg_value>",
        ["2</arg_value>\n<arg_key>city</arg_key>"],
        '{"days": 2',
    ),
    "pythonic": ("pythonic", "[weather(", ['city="Paris, France",', " days"], '{"city": "Paris, France"'),
    "pythonic, the call's end": ("pythonic", "[weather(", ["days=2)"], '{"days": 2}'),
}


@pytest.mark.parametrize(("parser", "head", "pieces", "arguments"), STREAMED.values(), ids=STREAMED)
def test_parts_of_arguments_come_when_they_are_certain(
    parser: str, head: str, pieces: list[str], arguments: str
) -> None:
    reader = opened(parser)
    events = reader.feed(head)
    for piece in pieces:
        events += reader.feed(piece)
    deltas = [event.arguments for event in events if isinstance(event, ToolCallDelta)]
    assert "".join(deltas) == arguments
    assert len(deltas) >= len(pieces) / 2, "in pieces"


BROKEN_OFF = {
    "glm, in a text": (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Par</arg",
        '{"city": "Par',
        "</arg",
    ),
    "glm, in a number": (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>1",
        '{"city": "Paris"',
        "<arg_key>days</arg_key><arg_value>1",
    ),
    "glm, a key twice": (
        "glm",
        "<tool_call>weather<arg_key>a</arg_key><arg_value>1</arg_value>"
        "<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        '{"a": 1, "a": 2}',
        "",
    ),
    "glm, a number that JSON does not have": (
        "glm",
        "<tool_call>weather<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>",
        '{"a": "NaN"}',
        "",
    ),
    "pythonic, in a value": ("pythonic", '[weather(city="Paris", days=[1, ', '{"city": "Paris"', " days=[1, "),
    "pythonic, a value that is none": ("pythonic", '[weather(city="x", days=f())]', '{"city": "x"', " days=f())]"),
    "pythonic, an unknown function behind": ("pythonic", "[weather(days=2), open()]", '{"days": 2}', ", open()]"),
    "deepseek v3, no fence": (
        "deepseek",
        f"{BEGIN}{CALL}function{SEP}weather\n```json\n{{}}{CALL_END}{END}",
        "{}",
        f"{CALL_END}{END}",
    ),
}


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(("parser", "text", "arguments", "content"), BROKEN_OFF.values(), ids=BROKEN_OFF)
def test_what_was_passed_on_stays(parser: str, text: str, arguments: str, content: str, size: int) -> None:
    """A call that breaks off is left open, so that no client takes it for whole."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    wanted = [("call", "weather", arguments), *([("content", content)] if content else [])]
    assert read(opened(parser), pieces) == wanted


TEMPLATES = {
    "GLM-5": (
        "glm",
        "{{ '<think>' + reasoning_content +  '</think>'}}\n"
        "{{- '<tool_call>' ~ tc.name -}}\n"
        "{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>",
    ),
    "DeepSeek-V3.2": (
        "dsml",
        '{%- set thinking_end_token = "</think>" -%}\n{%- set dsml_token = "｜DSML｜" -%}\n'
        "<{{ dsml_token }}function_calls>\n"
        '<{{ dsml_token }}invoke name="$FUNCTION_NAME">',
    ),
    "Kimi-K2-Thinking": (
        "kimi",
        "<|tool_calls_section_begin|>\n<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>\n"
        "<think>{{rc}}</think>{{render_content(message)}}",
    ),
}
"""Lines of chat templates that decide. That of GLM-5.3-Flash is as published on 2026-09-04; the other two are of
llama.cpp's models/templates (DeepSeek-V3.2.jinja, moonshotai-Kimi-K2-Thinking.jinja)."""


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_template_chooses_both_parsers(model: str) -> None:
    tool, template = TEMPLATES[model]
    found = choose_parsers(EngineConfig.create(model="demo"), chat_template=template)
    assert found == parsers(tool, "think")


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("thinks", [True, False])
def test_an_output_of_glm_5(size: int, thinks: bool) -> None:
    """Its template ends a prompt with the opening tag, or without reasoning with the closing one."""
    prompt = "<|user|>?<|assistant|>" + ("<think>" if thinks else "</think>")
    output = (
        ("I need the weather.</think>" if thinks else "")
        + "I look.<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>clock</tool_call>"
    )
    pieces = [output[i : i + size] for i in range(0, len(output), size)]
    assert read(opened("glm", "think", prompt), pieces) == [
        *([("reasoning", "I need the weather.")] if thinks else []),
        ("content", "I look."),
        ("call", "weather", '{"city": "Paris", "days": 2}'),
        ("call", "clock", "{}"),
    ]


def test_glm_takes_the_types_of_values_from_the_tools() -> None:
    call = "<tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>"
    assert read(opened("glm"), [call]) == [("call", "weather", '{"city": "12"}')]
    assert read(opened("glm"), [call.replace("city", "days")]) == [("call", "weather", '{"days": 12}')]


REASONING = {
    f"{parser}, {sample.name}": (parser, sample) for parser, samples in REASONING_SAMPLES.items() for sample in samples
}


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize(("parser", "sample"), REASONING.values(), ids=REASONING)
def test_reasoning(parser: str, sample: ParserSample, size: int) -> None:
    pieces = [sample.text[i : i + size] for i in range(0, len(sample.text), size)]
    assert read(opened(reasoning=parser, prompt=sample.prompt), pieces) == said(sample)


@pytest.mark.parametrize("size", [1, 10_000])
def test_reasoning_then_calls(size: int) -> None:
    for tool, reasoning, text in (
        ("hermes", "think", f"<think>\nI could <tool_call>.</think>\n\n{HERMES}"),
        ("mistral", "mistral", f"[THINK]I could <tool_call>.[/THINK][TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
        (
            "harmony",
            "harmony",
            "<|channel|>analysis<|message|>I could <tool_call>.<|end|><|start|>assistant to=functions.weather"
            f"<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}",
        ),
    ):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(opened(tool, reasoning), pieces) == [("reasoning", "I could <tool_call>."), WEATHER]
