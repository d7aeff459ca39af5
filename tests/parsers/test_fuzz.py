"""No output makes a parser raise or lose text, and how it was cut makes no difference."""

# ruff: noqa: RUF001  # DeepSeek's marks have wide bars
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parsers.reading import REASONING_PARSERS, TOOL_PARSERS, opened, read
from tests.support.examples import examples

MARKS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>",
    "<|call|>", "<|return|>", "<think>", "</think>", "[THINK]", "[/THINK]", "<|python_start|>", "<|python_end|>",
)  # fmt: skip
PARTS = (
    "weather", "clock", "function", "analysis", "final", "commentary", " to=functions.clock ", "json", "```json\n",
    "\n```", '{"name": "clock", "arguments": {}}', '{"name": "weather", "parameters": {"city": "x"}}', '{"city": "x"}',
    "{}", "{", "}", "[", "]", '"', "\\", "'", ",", ";", ":", "(", ")", "=", "\n", " ", "\t", "assistant", "ж", "a", "1",
    "[clock(", "clock()]", "[weather(city='x')]", '{"name": "', '", "arguments": ', "<", "</", "[T", "<|", "<｜",
)  # fmt: skip
pieces = st.lists(st.one_of(st.sampled_from(MARKS), st.sampled_from(PARTS), st.text(max_size=4)), max_size=40)


def cut(text: str, places: list[int]) -> list[str]:
    """``text`` cut at ``places``."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("tool", "reasoning"),
    [
        *((tool, "none") for tool in TOOL_PARSERS),
        *zip(("glm", "harmony", "mistral", "hermes"), REASONING_PARSERS, strict=True),
    ],
)
@examples(30)
@given(parts=pieces, places=st.lists(st.integers(0, 10_000), max_size=12))
def test_cuts_make_no_difference(tool: str, reasoning: str, parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    whole = read(opened(tool, reasoning), [text])
    assert read(opened(tool, reasoning), cut(text, places)) == whole
    assert read(opened(tool, reasoning), text) == whole


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@examples(50)
@given(parts=pieces)
def test_without_a_call_all_of_it_is_content(tool: str, parts: list[str]) -> None:
    text = "".join(parts)
    found = read(opened(tool), [text])
    if not any(kind == "call" for kind, *_ in found):
        assert found == ([("content", text)] if text else [])


@pytest.mark.parametrize("tool", sorted(set(TOOL_PARSERS) - {"harmony"}))
@examples(50)
@given(parts=pieces.map(lambda parts: [part for part in parts if part != "[CALL_ID]"]))
def test_no_letter_is_lost(tool: str, parts: list[str]) -> None:
    """Wherever a letter stands that is no part of a mark; headers and ids, which say nothing, are left out."""
    text = "".join(parts)
    said = "".join(each for _, *texts in read(opened(tool), [text]) for each in texts)
    assert said.count("ж") == text.count("ж")


names = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
prose = texts.filter(lambda text: not any(c in text for c in "<[{")).map(lambda text: f"{text}.")

BEGIN, END, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"
SEP, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
WRITTEN = {
    "hermes": lambda name, arguments: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "llama3_json": lambda name, arguments: f'<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}',
    "mistral": lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}",
    "deepseek": lambda name, arguments: f"{BEGIN}{CALL}{name}{SEP}{arguments}{CALL_END}{END}",
    "deepseek v3": lambda name, arguments: (
        f"{BEGIN}{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}{END}"
    ),
    "harmony": lambda name, arguments: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    ),
}


@pytest.mark.parametrize("tool", WRITTEN)
@examples(25)
@given(
    said=st.lists(st.tuples(prose, names, st.dictionaries(texts, values, max_size=3)), min_size=1, max_size=4),
    last=prose,
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_every_call_that_is_written_is_found(
    tool: str, said: list[tuple[str, str, dict[str, object]]], last: str, places: list[int]
) -> None:
    text, wanted = "", list[tuple[str, ...]]()
    for before, name, arguments in said:
        written = json.dumps(arguments, ensure_ascii=False)
        text += before + WRITTEN[tool](name, written)
        wanted += [("content", before), ("call", name, written)]
    assert read(opened(tool.partition(" ")[0]), cut(text + last, places)) == [*wanted, ("content", last)]


def glm(city: str, days: object) -> str:
    return (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n"
        f"<arg_key>days</arg_key>\n<arg_value>{json.dumps(days)}</arg_value>\n</tool_call>"
    )


def pythonic(city: str, days: object) -> str:
    return f"[weather(city={city!r}, days={days!r})]"


def dsml(city: str, days: object) -> str:
    return (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="days" string="false">{json.dumps(days)}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )


WEATHER = {"dsml": dsml, "glm": glm, "pythonic": pythonic}


@pytest.mark.parametrize("tool", WEATHER)
@examples(40)
@given(city=texts, days=values, places=st.lists(st.integers(0, 10_000), max_size=12))
def test_every_value_is_found(tool: str, city: str, days: object, places: list[int]) -> None:
    ((_, name, arguments),) = read(opened(tool), cut(WEATHER[tool](city, days), places))
    assert (name, json.loads(arguments)) == ("weather", {"city": city, "days": days})


LONG = {
    "opening marks": "<tool_call>" * 2000,
    "open texts": '<tool_call>{"' * 2000,
    "open brackets": "<tool_call>{" * 2000,
    "arrays": "[TOOL_CALLS][" * 2000,
    "keys": "<tool_call>a<arg_key>" * 1000,
    "values": "<tool_call>a<arg_key>b</arg_key><arg_value>" + "<" * 20_000,
    "separators": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>" + " " * 20_000,
    "headers": "<|start|>" * 2000,
    "blanks": " " * 20_000,
    "backslashes": '{"' + "\\" * 20_000,
    "lists": "[clock(" + "[" * 10_000,
    "almost ends": "<think>" + "</thin" * 3000,
}


def long_output(text: str, times: int) -> None:
    for tool, reasoning in (*((tool, "think") for tool in TOOL_PARSERS), ("none", "harmony"), ("none", "deepseek_r1")):
        long = text * times
        for size in (7, len(long)):
            found = read(opened(tool, reasoning), [long[i : i + size] for i in range(0, len(long), size)])
            assert not any(kind == "call" for kind, *_ in found)


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_outputs(text: str) -> None:
    long_output(text, 1)


LONG_ARGUMENTS = {
    "texts": ('{"x": "', "y"),
    "line breaks": ('{"x": "', "\n"),
    "objects": ('{"x": [', "{},"),
    "a member behind them": ('{}, "id": "', "y"),
}
LONG_TEXTS = {
    "ends that are none": ("<tool_call>weather<arg_key>city</arg_key><arg_value>", "</arg_valu"),
    "parts": ("<tool_call>weather", "<arg_key>city</arg_key><arg_value>x</arg_value>"),
}


@pytest.mark.parametrize(("head", "rest"), LONG_ARGUMENTS.values(), ids=LONG_ARGUMENTS)
def test_long_calls(head: str, rest: str) -> None:
    long = f'<tool_call>{{"name": "clock", "arguments": {head}' + rest * 50_000
    for size in (50, len(long)):
        found = read(opened("hermes"), [long[i : i + size] for i in range(0, len(long), size)])
        assert found[0][:2] == ("call", "clock")


@pytest.mark.parametrize(("head", "rest"), LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_long_texts(head: str, rest: str) -> None:
    long = head + rest * 5_000
    for size in (50, len(long)):
        found = read(opened("glm"), [long[i : i + size] for i in range(0, len(long), size)])
        assert found[0][:2] == ("call", "weather")


@pytest.mark.nightly
@pytest.mark.parametrize(("head", "rest"), LONG_ARGUMENTS.values(), ids=LONG_ARGUMENTS)
def test_very_long_calls(head: str, rest: str) -> None:
    """Work that grew with the square of the length would take ten minutes: the copies of 160,000 alone took 0.5 s."""
    parser = opened("hermes")
    parser.feed(f'<tool_call>{{"name": "clock", "arguments": {head}' + rest * 5_000_000)
    parser.finish()


@pytest.mark.nightly
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_very_long_outputs(text: str) -> None:
    """A hundred times as long: work that grows with the square of the length would take hours."""
    long_output(text, 100)
