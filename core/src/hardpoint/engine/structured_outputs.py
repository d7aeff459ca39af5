"""``StructuredOutputsParams``: vLLM's way to write a structured output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint_plugin_api import RequestError, StructuredOutput

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of ``json`` (a JSON schema), ``regex``, ``choice``, ``grammar`` (Lark or GBNF), ``json_object`` and
    ``structural_tag`` (JSON, or its object, with ``format``, or with ``structures`` and ``triggers``), as in vLLM.

    Raises RequestError for none of them or several.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes one of {', '.join(_KINDS)}, got {' and '.join(given) or None}"
            )

    @classmethod
    def read(cls, given: object) -> StructuredOutputsParams:
        """``given`` itself, or of a mapping of its fields. Raises RequestError for anything else."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise RequestError(f"structured_outputs must be a StructuredOutputsParams or a mapping, got {given!r:.80}")
        if unknown := sorted(map(str, set(given) - set(_KINDS))):
            raise RequestError(f"structured_outputs has no {', '.join(unknown)}; known: {', '.join(_KINDS)}")
        return cls(**given)

    @property
    def constraint(self) -> StructuredOutput:
        """The same as a StructuredOutput. Raises RequestError for a value of the wrong type."""
        if self.json is not None:
            return StructuredOutput.json_schema(self.json)
        if self.regex is not None:
            return StructuredOutput.regex(self.regex)
        if self.choice is not None:
            return StructuredOutput.choice(self.choice)
        if self.grammar is not None:
            return StructuredOutput.grammar(self.grammar)
        if self.structural_tag is not None:
            return _tags(self.structural_tag)
        return StructuredOutput.json_object()


def _tags(given: str | Mapping[str, Any]) -> StructuredOutput:
    try:
        tag = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structural_tag is not JSON: {error}") from None
    if isinstance(tag, Mapping) and "format" in tag:
        return StructuredOutput.structural_format(tag["format"])
    if not isinstance(tag, Mapping) or not all(isinstance(tag.get(key), list) for key in ("structures", "triggers")):
        raise RequestError("structural_tag must have a format, or the lists structures and triggers")
    return StructuredOutput.structural_tag(tag["structures"], tag["triggers"])
