"""Schemas as clients write them: what their grammars accept, and for which parsers of forced calls."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Literal

import pydantic
import pytest

from hardpoint.checkpoint.source import resolve_model
from hardpoint.parsers.lark import call_schema
from hardpoint.structured import Grammars
from hardpoint.structured.schemas import closed
from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import ParserArgs, RequestError, StructuredOutput, ToolParser
from tests.parsers.reading import parsers


class Grammar:
    """Says whether a text is one of a constraint's, by the demo model's tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.load(resolve_model("demo", None))
        self._grammars = Grammars.of(self.tokenizer, self.tokenizer.vocab_size)

    def accepts(self, structure: StructuredOutput, text: str) -> bool:
        state = self._grammars.start(structure, frozenset({self.tokenizer.eos_token_id or 0}))
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if not state.allowed[token // 8] >> token % 8 & 1:
                return False
            state.accept(token)
        end = self.tokenizer.eos_token_id or 0
        return state.is_complete or bool(state.allowed[end // 8] >> end % 8 & 1)


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return Grammar()


class City(pydantic.BaseModel):
    name: Literal["Paris", "Oslo"]
    suburbs: list[City] = []


class Trip(pydantic.BaseModel):
    to: City


class Node(pydantic.BaseModel):
    """A schema whose definition is itself, so that its root is a reference."""

    value: Literal[1, 2]
    next: Node | None = None


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ROOT = {
    "type": "object",
    "properties": {"value": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value"],
    "additionalProperties": False,
}
TRIP, NODE, LIST = tool("trip", Trip.model_json_schema()), tool("node", Node.model_json_schema()), tool("list", ROOT)
RIGHT = {
    "trip": '{"to": {"name": "Paris", "suburbs": [{"name": "Oslo"}]}}',
    "node": '{"value": 1, "next": {"value": 2}}',
    "list": '{"value": 1, "next": {"value": 2, "next": null}}',
}
WRONG = {"trip": '{"to": {"name": "Rome"}}', "node": '{"value": 1, "next": {"value": 3}}', "list": '{"value": 7}'}


def written(parser: str, name: str, arguments: str) -> str:
    """A call as ``parser`` reads it."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    return {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3_json": call.replace("arguments", "parameters"),
        "mistral": f"[TOOL_CALLS][{call}]",
        "harmony": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        "any": call,
    }[parser]


def constraint(parser: str, tools: list[Any], name: str | None) -> StructuredOutput:
    args = ParserArgs(tools=tools)
    if parser == "any":
        return StructuredOutput.json_schema(
            call_schema(args.functions if name is None else {name: args.functions[name]})
        )
    tool_parser: type[ToolParser] | None = parsers(parser).tool
    assert tool_parser is not None
    found = tool_parser(args).constraint(name, parallel=False)
    assert found is not None
    return found


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "harmony", "any"])
@pytest.mark.parametrize("tools", [[TRIP], [NODE], [LIST], [TRIP, NODE, LIST]], ids=len)
def test_references_lead_to_the_definitions_of_their_own_tool(grammar: Grammar, parser: str, tools: list[Any]) -> None:
    for each in tools:
        name = each["function"]["name"]
        for chosen in (name, None):
            structure = constraint(parser, tools, chosen)
            assert grammar.accepts(structure, written(parser, name, RIGHT[name]))
            assert not grammar.accepts(structure, written(parser, name, WRONG[name]))


class Price(pydantic.BaseModel):
    amount: Decimal


ANNOTATED: dict[str, tuple[Any, str, str]] = {
    "Decimal": (Price.model_json_schema(), '{"amount": "1.50"}', '{"amount": true}'),
    "an unknown format": ({"type": "string", "format": "password"}, '"x"', "1"),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 2]", '["a"]'),
    "not": ({"type": "integer", "not": {"const": 3}}, "4", '"x"'),
    "if": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 9}}, "4", "true"),
    "oneOf": ({"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]}, '{"a": 1}', "[]"),
    "back-references": ({"type": "string", "pattern": r"^(a|b)\1$"}, '"aa"', "1"),
    "a property called pattern": (
        {"type": "object", "properties": {"pattern": {"const": "(?=x)"}}, "additionalProperties": False},
        '{"pattern": "(?=x)"}',
        '{"pattern": "x"}',
    ),
    "a class with look-ahead's characters": ({"type": "string", "pattern": "^[(?=x]$"}, '"?"', '"y"'),
}


@pytest.mark.parametrize(("schema", "right", "wrong"), ANNOTATED.values(), ids=ANNOTATED)
def test_keywords_that_no_grammar_enforces_are_annotations(
    grammar: Grammar, schema: Any, right: str, wrong: str
) -> None:
    call = tool("f", {"type": "object", "properties": {"x": schema}, "required": ["x"]})
    structures = [
        (StructuredOutput.json_schema(schema), "{}"),
        (constraint("hermes", [call], "f"), written("hermes", "f", '{"x": {}}')),
    ]
    for structure, around in structures:
        assert grammar.accepts(structure, around.replace("{}", right))
        assert not grammar.accepts(structure, around.replace("{}", wrong))


def test_a_schema_may_ask_to_be_refused(grammar: Grammar) -> None:
    strict = {"type": "integer", "not": {"const": 3}, "x-guidance": {"lenient": False}}
    with pytest.raises(RequestError, match="not"):
        grammar.accepts(StructuredOutput.json_schema(strict), "3")


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"type": "array", "items": A}, '[{"a": 1}]', '[{"b": 1}]'),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, '{"a": 1}', '{"b": 1}'),
        ({"anyOf": [A, B]}, '{"b": 1}', '{"a": 1, "b": 1}'),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, '{"a": 1, "b": 2}', '{"a": "x"}'),
        ({"properties": {"c": A}, "allOf": [B], "type": "object"}, '{"c": {"a": 1}, "b": 2}', '{"c": {"b": 1}}'),
        (A | {"additionalProperties": {"type": "string"}}, '{"a": 1, "b": "x"}', '{"b": 1}'),
        ({"type": "object"}, '{"a": 1}', "[]"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_objects_are_closed_where_that_leaves_what_the_schema_allows(
    grammar: Grammar, schema: Any, right: str, wrong: str
) -> None:
    before = json.dumps(schema)
    structure = StructuredOutput.json_schema(closed(schema))
    assert json.dumps(schema) == before
    assert grammar.accepts(structure, right)
    assert not grammar.accepts(structure, wrong)
