"""Structural tags in the form of xgrammar: texts that each format takes, texts that it does not, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardpoint.checkpoint.source import demo_model
from hardpoint.structured.grammars import Grammars
from hardpoint.structured.structural_tags import grammar_of_format
from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import RequestError, StructuredOutput

Format = dict[str, Any]
ANY: Format = {"type": "any_text"}
NUMBER: Format = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
SPECIAL = "<|im_start|>"


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def tag(begin: object, content: Format, end: object) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: object) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def triggered(*tags: Format, triggers: tuple[str, ...] = ("<f=",), **more: object) -> Format:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **more}


def separated(**more: object) -> Format:
    return {"type": "tags_with_separator", "tags": [tag("<i>", NUMBER, "</i>")], "separator": ",", **more}


CALL = tag("<f=a>", NUMBER, "</f>")
CALLED = '<f=a>{"n":1}</f>'
CASES: dict[str, tuple[Format, list[str], list[str]]] = {
    "a text": (text('Hello/"x"'), ['Hello/"x"'], ["Hello", 'Hello/"x" ']),
    "JSON": (NUMBER, ['{"n":1}'], ["{}"]),
    "a pattern": ({"type": "regex", "pattern": r"a/[b-c]+\d"}, ["a/bc7"], ["a/b", "x"]),
    "a grammar": ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= [0-9]+'}, ["a12"], ["b", "a"]),
    "any text": (ANY, ["", "a\nb"], []),
    "excluded texts": ({**ANY, "excludes": ["a.b", "c\n /d&"]}, ["axb", "c\n/d&"], ["_a.b_", "c\n /d&"]),
    "a sequence": (sequence(text("A: "), NUMBER), ['A: {"n":3}'], ["A: ", '{"n":3}']),
    "free text before a text": (sequence(ANY, text("END"), NUMBER), ['x END{"n":3}', 'END{"n":3}'], ["x", "x END"]),
    "free text before a tag": (sequence(ANY, CALL), [f"x{CALLED}"], ["x", "<f=b>"]),
    "a tag": (tag("<t>", ANY, "</t>"), ["<t>a < b</t>", "<t></t>"], ["<t>a</t>x", "<t>a", "a</t>"]),
    "a tag with ends": (tag("<r>", ANY, ["</r>", "</a>"]), ["<r>x</a>", "<r>x</r>"], ["<r>x</b>", "<r></r></a>"]),
    "a tag without an end": (tag("<r>", ANY, ""), ["<r>", "<r>x"], ["x"]),
    "tags in tags": (
        tag("<o>", sequence(text("1"), tag("<i>", ANY, "</i>"), ANY), "</o>"),
        ["<o>1<i>x</i>y</o>"],
        ["<o>1<i>x</i>y", "<o>1</o>"],
    ),
    "alternatives": (either(text("yes"), text("no")), ["yes", "no"], ["maybe", "yesno"]),
    "free alternatives in a tag": (
        tag("<o>", either(NUMBER, sequence(text("T"), ANY)), "</o>"),
        ['<o>{"n":1}</o>', "<o>T x</o>"],
        ["<o>x</o>", "<o>T x</o>y"],
    ),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": text("ab")}, ["ab", "abab"], ["", "ababab"]),
    "repeat without end": ({"type": "repeat", "min": 2, "max": -1, "content": text("ab")}, ["ab" * 5], ["ab"]),
    "repeated alternatives": ({"type": "plus", "content": either(text("a"), text("b"))}, ["a", "abba"], ["", "ac"]),
    "optional": (sequence({"type": "optional", "content": text("P: ")}, text("x")), ["P: x", "x"], ["P: "]),
    "optional free text": ({"type": "optional", "content": sequence(text("P"), ANY)}, ["", "Px"], ["x"]),
    "star": ({"type": "star", "content": text("x")}, ["", "xx"], ["y"]),
    "triggers": (
        triggered(CALL, tag("<f=b>", ANY, "</f>")),
        [f"hi {CALLED}, <f=b>x</f>.", "a < b", ""],
        ["<f=c", "<f=a>{}", "<f=b>x"],
    ),
    "the first trigger": (
        triggered(CALL, stop_after_first=True),
        [f"hi {CALLED}", "hi"],
        [f"hi {CALLED}x", "<f=c"],
    ),
    "at least one": (triggered(CALL, at_least_one=True), [f"{CALLED} and {CALLED}"], ["", f" {CALLED}"]),
    "exactly one": (
        sequence(tag("<t>", ANY, "</t>"), triggered(CALL, at_least_one=True, stop_after_first=True)),
        [f"<t>h</t>{CALLED}"],
        ["<t>h</t>", f"<t>h</t> {CALLED}", f"<t>h</t>{CALLED}x"],
    ),
    "triggers and excluded texts": (
        triggered(CALL, excludes=["bad"]),
        [f"hi {CALLED}more"],
        ["hi bad", f"hi {CALLED}bad"],
    ),
    "triggers in a tag": (
        tag("<o>", triggered(CALL), "</o>"),
        [f"<o>hi {CALLED}more</o>", "<o></o>"],
        ["<o></o>x", "<o>hi"],
    ),
    "special tokens": (
        triggered(CALL, tag(f"{SPECIAL}q", NUMBER, SPECIAL), triggers=("<f=", SPECIAL)),
        [f'hi {CALLED}x{SPECIAL}q{{"n":1}}{SPECIAL} so'],
        [f"hi {SPECIAL}a"],
    ),
    "a token": (
        tag({"type": "token", "token": SPECIAL}, ANY, {"type": "token", "token": SPECIAL}),
        [f"{SPECIAL}hi{SPECIAL}"],
        ["hi", f"{SPECIAL}hi"],
    ),
    "separated": (separated(), ['<i>{"n":1}</i>,<i>{"n":1}</i>', ""], ['<i>{"n":1}</i><i>{"n":1}</i>']),
    "one of them": (
        separated(at_least_one=True, stop_after_first=True),
        ['<i>{"n":1}</i>'],
        ["", '<i>{"n":1}</i>,<i>{"n":1}</i>'],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["<f>", NUMBER], ["<g>", text("x")]]},
        ['a <g>x b <f>{"n":1} c', "a"],
        ["<g>y"],
    ),
    "dispatch once": (
        {"type": "dispatch", "rules": [["<g>", text("x")]], "loop": False},
        ["a <g>x", "a"],
        ["a <g>xb"],
    ),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars.of(Tokenizer.load(demo_model()), 4096)


def takes(grammars: Grammars, form: Format, output: str) -> bool:
    """Whether ``output`` as a whole is of the format."""
    import llguidance

    tokens = grammars._tokenizer()
    matcher = llguidance.LLMatcher(tokens, grammar_of_format(form, tokens), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(output, parse_special=True)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("form", "right", "wrong"), CASES.values(), ids=CASES)
def test_texts_of_a_format(grammars: Grammars, form: Format, right: list[str], wrong: list[str]) -> None:
    assert [output for output in right if not takes(grammars, form, output)] == []
    assert [output for output in wrong if takes(grammars, form, output)] == []


REFUSED: dict[str, tuple[Format, str]] = {
    "no format": ({"type": "poem"}, "format: must be an object whose type is one of any_text"),
    "no object": (sequence(text("a"), "b"), r"format\.elements\[1\]: must be an object"),
    "no content": ({"type": "star"}, r"format\.content: must be an object"),
    "no elements": (either(), "elements is a list of formats"),
    "free text before JSON": (sequence(ANY, NUMBER), r"elements\[0\]: free text must stand last"),
    "free text again and again": ({"type": "star", "content": ANY}, "nothing ends it"),
    "a style": ({**NUMBER, "style": "qwen_xml"}, "the style 'qwen_xml' is not supported"),
    "a trigger of nothing": (triggered(tag("<g>", NUMBER, "")), "no trigger begins '<g>'"),
    "an endless tag": (triggered(tag("<f=a>", ANY, "")), r"tags\[0\]: a tag with free text needs an end"),
    "no token": ({"type": "token", "token": "hello"}, "not the text of one special token"),
    "the end of outputs": (text("a<|im_end|>"), "the token that ends outputs"),
    "a range": ({"type": "repeat", "min": 3, "max": 2, "content": text("a")}, "min at most max"),
    "too much": (
        tag("<o>", either(*(sequence(text(str(i)), ANY) for i in range(2000))), "e" * 1000),
        "more than 1048576 characters",
    ),
}


@pytest.mark.parametrize(("form", "words"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_format_is_refused_with_its_place(grammars: Grammars, form: Format, words: str) -> None:
    with pytest.raises(RequestError, match=f"this structural_tag cannot be used: .*{words}"):
        grammars.start(StructuredOutput.structural_format(form))


def test_nesting_costs_no_more_than_its_size(grammars: Grammars) -> None:
    form = tag("<f=0>", NUMBER, "</f>")
    for _ in range(30):
        form = tag("<f=0>", triggered(form, at_least_one=True, stop_after_first=True), "</f>")
    grammar = grammar_of_format(form, grammars._tokenizer())
    assert len(grammar) < 20 * len(json.dumps(form))
