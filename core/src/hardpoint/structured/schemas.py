"""JSON schemas of clients, rewritten so that a grammar can enforce them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""Keywords that add properties of other schemas to an object."""
_OPENS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Keywords that say which other properties an object may have."""
_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{0,8}", "lenient": True}
"""Blanks between the parts of a JSON text are bounded: a model may write them for ever where a grammar lets it."""
_PARTS = re.compile(r"(?P<irregular>\(\?<?[=!]|\\[1-9]|\\k<)|\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
"""The parts of a pattern. A class that never ends is one, so that each character is looked at once."""


def guided(schema: Any) -> str:
    """The text of ``schema`` for llguidance, with its options, which the schema's own ``x-guidance`` overrides.

    A keyword that no grammar enforces (``not``, ``uniqueItems``, an unknown ``format``) counts as an annotation, and so
    does a ``pattern`` with look-around or back-references. Pydantic writes such a pattern for each Decimal.
    """
    plain = _mapped(schema, _without_irregular_pattern)
    if plain is True:
        plain = {}
    if isinstance(plain, Mapping):
        own = plain.get("x-guidance")
        plain = {**plain, "x-guidance": {**_OPTIONS, **(own if isinstance(own, Mapping) else {})}}
    return json.dumps(plain, ensure_ascii=False)


def closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` for each object that lists properties and does not say.

    Schemas that describe one object together, such as the parts of ``allOf``, stay open: each would exclude the
    properties of the others.
    """
    together = [part for each in _subschemas(schema) for part in _describing_together(each)]
    targets = [_target(schema, part["$ref"]) for part in together if isinstance(part.get("$ref"), str)]
    kept = {id(part) for part in (*together, *targets)}  # which the schema keeps

    def is_closed(part: Schema) -> bool:
        if not isinstance(part.get("properties"), Mapping) or id(part) in kept:
            return False
        return not any(key in part for key in (*_OPENS, *_COMBINES))

    return _mapped(schema, lambda part: {**part, "additionalProperties": False}, is_closed)


def _describing_together(schema: Schema) -> list[Schema]:
    """``schema`` and its parts, if several of them describe the same object at once."""
    if len(schema.keys() & {"properties", *_COMBINES}) < 2 and len(_parts(schema, "allOf")) < 2:
        return []
    return list(_with_parts(schema))


def _with_parts(schema: Schema) -> Iterator[Schema]:
    yield schema
    for key in ("allOf", "anyOf", "oneOf"):
        for part in _parts(schema, key):
            yield from _with_parts(part)


def _parts(schema: Schema, key: str) -> list[Schema]:
    parts = schema.get(key)
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []


def _mapped(schema: Any, change: Callable[[Schema], Schema], applies: Callable[[Schema], bool] = lambda _: True) -> Any:
    """``schema`` with ``change`` made to each subschema that ``applies`` accepts as it was."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in _ONE:
        if key in made:
            made[key] = _mapped(made[key], change, applies)
    for key in _LISTED:
        if isinstance(made.get(key), list):
            made[key] = [_mapped(part, change, applies) for part in made[key]]
    for key in _NAMED:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _mapped(part, change, applies) for name, part in made[key].items()}
    return change(made) if applies(schema) else made


def _subschemas(schema: object) -> Iterator[Schema]:
    """Each subschema of ``schema``, itself included."""
    found: list[Schema] = []

    def note(part: Schema) -> bool:
        found.append(part)
        return False

    _mapped(schema, lambda part: part, note)
    return iter(found)


def _target(schema: object, ref: str) -> object:
    """The subschema that ``ref`` names by a pointer within ``schema``; None for anything else."""
    if not ref.startswith("#"):
        return None
    found = schema
    for name in ref[1:].split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _without_irregular_pattern(schema: Schema) -> Schema:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and any(found["irregular"] for found in _PARTS.finditer(pattern)):
        return {key: value for key, value in schema.items() if key != "pattern"}
    return schema
