"""Structured output: constraints that every token of an output must satisfy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

from hardpoint_plugin_api.errors import RequestError

StructureKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
"""Kinds of a StructuredOutput, which say how its ``value`` is read."""


@dataclass(frozen=True)
class StructuredOutput:
    """One constraint on a whole output. Created by the class methods; plain, hashable, picklable.

    ``value``: the text of a JSON schema; a regular expression (syntax of Rust's ``regex`` crate: no look-around, no
    back-references); a grammar, in llguidance's dialect of Lark or in llama.cpp's GBNF; the format of a
    structural tag, as JSON; empty for ``json_object``. ``choices``: the texts of ``choice``.

    ``after``: the output is free up to and including this text, and constrained after it, so that a model may reason
    first. ``opening``: the output is free before ``after`` only if it begins with this text, which must be a single
    token; else it is constrained from its first token.

    Raises RequestError for wrong types. Schemas and grammars are compiled when a request is admitted.
    """

    kind: StructureKind
    value: str = ""
    choices: tuple[str, ...] = ()
    after: str = ""
    opening: str = ""

    def __post_init__(self) -> None:
        kinds = get_args(StructureKind)
        if self.kind not in kinds:
            raise RequestError(f"structured output: the kind must be one of {', '.join(kinds)}, got {self.kind!r:.80}")
        texts = {"value": self.value, "after": self.after, "opening": self.opening}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise RequestError(f"structured output: {name} must be a text, got {text!r:.80}")
        if self.opening and not self.after:
            raise RequestError("structured output: opening says when after counts; give both")
        if (self.kind == "choice") != bool(self.choices):
            raise RequestError("structured output: choices must be a list of at least one text, and go with choice")
        if not isinstance(self.choices, tuple) or not all(isinstance(c, str) and c for c in self.choices):
            raise RequestError(f"structured output: choices must be texts that are not empty, got {self.choices!r:.80}")
        if self.kind in ("json_schema", "regex", "grammar", "structural_tag") and not self.value:
            raise RequestError(f"structured output: the {self.kind} is empty")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, object]) -> Self:
        """JSON that is valid by ``schema``: an object, or its JSON text. The order of properties is the schema's."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"structured output: the JSON schema is not JSON: {error}") from None
        if not isinstance(schema, bool | Mapping):
            raise RequestError(f"structured output: a JSON schema is an object, got {schema!r:.80}")
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured output: the schema cannot be written as JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Self:
        """A constraint that any JSON object meets."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that ``pattern`` matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Self:
        """Text that a grammar derives: Lark from its rule ``start``, GBNF from its rule ``root``."""
        return cls("grammar", text)

    @classmethod
    def structural_tag(cls, structures: Sequence[Mapping[str, object]], triggers: Sequence[str]) -> Self:
        """Free text in which each of ``triggers`` begins one of ``structures``, and nothing else.

        A structure has the texts ``begin``, which begins with a trigger, and ``end``, and between them JSON by
        ``schema``; without a schema, any JSON.
        """
        if not structures or not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise RequestError("structural_tag needs structures, and triggers that are texts and not empty")
        plain = []
        for structure in structures:
            begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
            if not isinstance(begin, str) or not isinstance(end, str):
                raise RequestError(f"structural_tag: begin and end of a structure are texts, got {structure!r:.80}")
            if not any(begin.startswith(each) for each in triggers):
                raise RequestError(f"structural_tag: no trigger begins {begin!r:.80}; triggers: {list(triggers)!r:.80}")
            content = {"type": "json_schema", "json_schema": schema if isinstance(schema, Mapping) else {}}
            plain.append({"type": "tag", "begin": begin, "content": content, "end": end})
        return cls.structural_format({"type": "triggered_tags", "triggers": list(triggers), "tags": plain})

    @classmethod
    def structural_format(cls, form: Mapping[str, object]) -> Self:
        """Text of a format, as xgrammar and vLLM write it.

        An example is a tag, an object with ``type``, ``begin``, ``content`` and ``end``. An invalid format is refused
        when a request is admitted.
        """
        if not isinstance(form, Mapping):
            raise RequestError(f"structural_tag: a format is an object, got {form!r:.80}")
        try:
            return cls("structural_tag", json.dumps(form, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structural_tag: the format cannot be written as JSON: {error}") from None

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Self:
        """Constrain the output to one of the texts in ``choices``. Raises RequestError for anything but a list."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise RequestError(f"structured output: choices must be a list of texts, got {choices!r:.80}")
        return cls("choice", choices=tuple(choices))
