"""A call as models write it in JSON, and how it becomes one as clients read it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_READ = json.JSONDecoder(strict=False, parse_constant=_refuse)
"""Takes line breaks within texts, which models write; not NaN, which clients cannot read."""
_ARGUMENTS = {"arguments", "parameters"}
_SILENT = {"id", "type"}
_MEMBERS = {"name"} | _SILENT | _ARGUMENTS
_BLANKS = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Call:
    """A function's name, and the text of the JSON object of its arguments."""

    name: str
    arguments: str


def read_call(text: str) -> Call | None:
    """A JSON object with ``name`` and ``arguments`` (or ``parameters``); None for anything else.

    It may have an ``id`` and a ``type``, which say nothing; with other members, which would be lost, it is no call.
    """
    members = _members(text) if text.startswith("{") else None
    if members is None or "name" not in members or not members.keys() <= _MEMBERS or members.keys() >= _ARGUMENTS:
        return None
    name = members["name"][0]
    value, written = next((members[key] for key in _ARGUMENTS if key in members), ({}, "{}"))
    if isinstance(value, str):  # an object written as a text
        return call_of(name, value)
    return call_of(name, written)


def name_before_arguments(head: str) -> str | None:
    """The name in such an object's beginning, up to where its arguments' own object begins; None for anything else."""
    members = _members(head + "{}}")
    if not members or "name" not in members or not members.keys() <= _MEMBERS or members.keys() >= _ARGUMENTS:
        return None
    return function_name(members["name"][0]) if list(members)[-1] in _ARGUMENTS else None


def says_nothing(tail: str) -> bool:
    """Whether what follows a call's arguments, the object's last bracket included, has members that say nothing."""
    members = _members("{" + tail)
    return members is not None and members.keys() <= _SILENT


def function_name(name: object) -> str | None:
    """``name`` as a function's; None for what can be none, such as a text with a lone surrogate."""
    try:
        return name.encode().decode().strip() or None if isinstance(name, str) else None
    except UnicodeEncodeError:
        return None


def call_of(name: object, arguments: str) -> Call | None:
    """A call, if ``name`` can be one's and ``arguments`` are an object; what is not quite JSON is written anew."""
    known = function_name(name)
    try:
        value, end = _READ.raw_decode(arguments, _skip(arguments, 0))
        if known is None or not isinstance(value, dict) or _skip(arguments, end) != len(arguments):
            return None
        return Call(known, _as_json(value, arguments.strip()))
    except (ValueError, RecursionError):
        return None


def json_string(text: str) -> str:
    """``text`` as a JSON string."""
    return json_text(text)


def json_text(value: object) -> str:
    """``value`` as JSON. Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _as_json(value: Mapping[str, Any], written: str) -> str:
    """As the model wrote it, if that is JSON: the same numbers in the same order."""
    try:
        json.loads(written)
        written.encode()
    except ValueError:
        return json_text(value)
    return written


def _members(text: str) -> dict[str, tuple[Any, str]] | None:
    """The members of the JSON object ``text``, each as a value and as it is written; None for anything else."""
    members: dict[str, tuple[Any, str]] = {}
    try:
        pos = _skip(text, 1)
        while text[pos : pos + 1] == '"':
            key, pos = _READ.raw_decode(text, pos)
            pos = _skip(text, pos)
            if text[pos] != ":":
                return None
            start = _skip(text, pos + 1)
            value, pos = _READ.raw_decode(text, start)
            if key in members:
                return None
            members[str(key)] = (value, text[start:pos])
            pos = _skip(text, pos)
            if text[pos] != ",":
                break
            pos = _skip(text, pos + 1)
            if text[pos] != '"':
                return None
        return members if text[pos:] == "}" else None
    except (ValueError, IndexError, RecursionError):
        return None


def _skip(text: str, pos: int) -> int:
    found = _BLANKS.match(text, pos)
    assert found is not None
    return found.end()


def as_json(written: str) -> str:
    """A value that is JSON, or else a text."""
    try:
        return json_text(json.loads(written))
    except (ValueError, RecursionError):
        return json_string(written)
