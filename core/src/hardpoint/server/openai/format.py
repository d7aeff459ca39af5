"""``response_format``: what a completion must look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hardpoint.server.fields import ProtocolModel
from hardpoint.structured.schemas import closed
from hardpoint_plugin_api import RequestError, StructuredOutput


class TextFormat(ProtocolModel):
    """Text of any form."""

    type: Literal["text"]

    def structure(self) -> None:
        """No constraint."""


class JsonObjectFormat(ProtocolModel):
    """Any JSON object."""

    type: Literal["json_object"]

    def structure(self) -> StructuredOutput:
        """The constraint."""
        return StructuredOutput.json_object()


class NamedSchema(ProtocolModel):
    """A schema, which is enforced with ``strict`` or without; ``strict`` closes objects that do not say."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None

    def structure(self) -> StructuredOutput:
        """The constraint; any JSON object where no schema is given."""
        if self.schema_ is None:
            return StructuredOutput.json_object()
        return StructuredOutput.json_schema(closed(self.schema_) if self.strict else self.schema_)


class JsonSchemaFormat(ProtocolModel):
    """JSON that is valid by a schema, in the form of chat completions."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def structure(self) -> StructuredOutput:
        """The constraint."""
        return self.json_schema.structure()


class FlatJsonSchemaFormat(NamedSchema):
    """The same in the form of responses."""

    type: Literal["json_schema"]


class RegexFormat(ProtocolModel):
    """Text that ``pattern`` matches as a whole. An extension, as are the two that follow."""

    type: Literal["regex"]
    pattern: str

    def structure(self) -> StructuredOutput:
        """The constraint."""
        return StructuredOutput.regex(self.pattern)


class GrammarFormat(ProtocolModel):
    """Text of a grammar, in Lark or GBNF."""

    type: Literal["grammar"]
    grammar: str

    def structure(self) -> StructuredOutput:
        """The constraint."""
        return StructuredOutput.grammar(self.grammar)


class ChoiceFormat(ProtocolModel):
    """One of several texts."""

    type: Literal["choice"]
    choices: list[str]

    def structure(self) -> StructuredOutput:
        """The constraint."""
        return StructuredOutput.choice(self.choices)


class TagStructure(ProtocolModel):
    """JSON by a schema between two texts."""

    begin: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    end: str


class StructuralTagFormat(ProtocolModel):
    """Text of a ``format``, or free text in which ``triggers`` begin ``structures``; as xgrammar, vLLM and SGLang write
    it."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None

    def structure(self) -> StructuredOutput:
        """The constraint. Raises RequestError."""
        is_flat = self.structures is not None and self.triggers is not None
        if (self.format is None) != is_flat or (self.format is not None and (self.structures or self.triggers)):
            raise RequestError("structural_tag takes a format, or structures and triggers")
        if self.format is not None:
            return StructuredOutput.structural_format(self.format)
        assert self.structures is not None
        assert self.triggers is not None
        structures = [each.model_dump(by_alias=True) for each in self.structures]
        return StructuredOutput.structural_tag(structures, self.triggers)


_Extension = RegexFormat | GrammarFormat | ChoiceFormat | StructuralTagFormat
ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | _Extension, Field(discriminator="type")]
TextFormatOfResponses = Annotated[
    TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | _Extension, Field(discriminator="type")
]
