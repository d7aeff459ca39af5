"""Grammars of forced calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hardpoint.structured.schemas import guided
from hardpoint_plugin_api import ParserArgs, RequestError, StructuredOutput


def functions_of(args: ParserArgs, name: str | None) -> dict[str, Mapping[str, Any]]:
    """The functions that may be called: all, or that called ``name``. Raises RequestError where there is none."""
    functions = args.functions
    if name is not None and name not in functions:
        raise RequestError(f"tool_choice names {name!r}, which is none of the tools: {', '.join(functions) or 'none'}")
    if not functions:
        raise RequestError("a call is demanded, and there are no tools")
    return functions if name is None else {name: functions[name]}


def literal(args: ParserArgs, text: str) -> str:
    """``text`` in a grammar: as the special token that it is, or by its characters."""
    token = args.special_tokens.get(text)
    return quoted(text) if token is None else f"<[{token}]>"


def quoted(text: str) -> str:
    """``text`` as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of a function's arguments: always an object."""
    schema = function.get("parameters")
    if not isinstance(schema, Mapping):
        return {"type": "object"}
    return schema if "type" in schema or "$ref" in schema else {**schema, "type": "object"}


def call_schema(functions: Mapping[str, Mapping[str, Any]], key: str = "arguments") -> dict[str, Any]:
    """The JSON schema of an object with the name of a function, and its arguments under ``key``.

    The schema of arguments has an ``$id``, so that its references (``#/$defs/City``, ``#``) lead to itself.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$id": f"urn:hardpoint:tool:{i}", **parameters(function)}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, (name, function) in enumerate(functions.items())
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def grammar(start: str, **rules: str) -> StructuredOutput:
    """A grammar of the rule ``start`` and others."""
    lines = [f"start: {start}", *(f"{name}: {rule}" for name, rule in rules.items())]
    return StructuredOutput.grammar("\n".join(lines))


def json_of(schema: Mapping[str, Any]) -> str:
    """A rule for JSON that is valid by ``schema``."""
    return f"%json {guided(schema)}"
