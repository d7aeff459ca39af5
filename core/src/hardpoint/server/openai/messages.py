"""Messages and tools of chat completions, and how chat templates know them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Discriminator, Field, Tag

from hardpoint.server.errors import ApiError
from hardpoint.server.fields import ProtocolModel, UnknownPart
from hardpoint.server.turn import ToolChoice
from hardpoint.structured.schemas import closed

_MOST_LEVELS = 100
"""Of the arguments of a call."""


class TextPart(ProtocolModel):
    """Text as a part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(ProtocolModel):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    refusal: str


class ForeignPart(ProtocolModel):
    """An image, a sound or a file: known, so that it can be refused by name."""

    type: Literal["image_url", "input_audio", "file", "video_url", "audio_url"]
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    audio_url: Any = None


Part = Annotated[TextPart | RefusalPart | ForeignPart, Field(discriminator="type")]


class FunctionCall(ProtocolModel):
    """The function of a call; ``arguments`` is JSON."""

    name: str
    arguments: str


class MessageToolCall(ProtocolModel):
    """A call that an assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(ProtocolModel):
    """A message of any role. A message of an answer may be sent back as it came, nulls included."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionTool(ProtocolModel):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionEntry(ProtocolModel):
    """A function in a list of tools."""

    type: Literal["function"]
    function: FunctionTool


def is_function(tool: object) -> str:
    """The tag of an entry of a list of tools: others than functions are ignored."""
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else getattr(tool, "type", "function")
    return "function" if kind in ("function", "custom", None) else "unknown"


Tool = Annotated[
    Annotated[FunctionEntry, Tag("function")] | Annotated[UnknownPart, Tag("unknown")], Discriminator(is_function)
]


class NamedFunction(ProtocolModel):
    """A function by its name."""

    name: str


class NamedTool(ProtocolModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as templates know them.

    Parts become one text; a developer's message is a system message; the arguments of earlier calls are objects, as
    templates write them out by themselves. Raises ApiError for what no template can be given.
    """
    return [_template_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The tools as templates know them. Raises ApiError where two have one name."""
    return function_tools([tool.function for tool in tools or () if isinstance(tool, FunctionEntry)])


class Function(Protocol):
    """A function that the model may call, in any protocol; ``parameters`` is a JSON schema."""

    name: str
    description: str | None
    strict: bool | None

    @property
    def parameters(self) -> Mapping[str, Any] | None: ...


def function_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """The functions as templates know them; ``strict`` closes objects that do not say whether they are open.

    Raises ApiError where two have one name.
    """
    check_names([function.name for function in functions])
    return [{"type": "function", "function": _template_function(function)} for function in functions]


def _template_function(function: Function) -> dict[str, Any]:
    schema = function.parameters
    members = {
        "name": function.name,
        "description": function.description,
        "parameters": closed(schema) if function.strict else schema,
    }
    return {key: value for key, value in members.items() if value is not None}


def check_names(names: Sequence[str]) -> None:
    """Raise ApiError where two tools have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ApiError(400, f"tools: two tools are called {name!r}", param="tools")


def tool_choice(choice: str | NamedTool | None, *, has_tools: bool, parallel: bool | None) -> ToolChoice:
    """The tool choice of a request. Raises ApiError for a choice without tools."""
    mode = choice.function.name if isinstance(choice, NamedTool) else choice
    if not has_tools and (isinstance(choice, NamedTool) or mode == "required"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    own_parallel = parallel is not False
    if isinstance(choice, NamedTool):
        return ToolChoice("function", choice.function.name, own_parallel)
    return ToolChoice(choice or "auto", None, own_parallel)


def joined_text(parts: Sequence[Part], place: str) -> str:
    """The parts' texts, each on lines of its own. Raises ApiError for a part that is no text."""
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, ForeignPart):
            raise ApiError(
                400,
                f"{place}[{number}]: the model reads text alone, and nothing is fetched for a client; "
                f"leave out the part of type {part.type!r}",
                param=f"{place}[{number}].{part.type}",
            )
        texts.append(part.text if isinstance(part, TextPart) else part.refusal)
    return "\n".join(texts)


def parsed_arguments(arguments: str) -> Mapping[str, Any]:
    """The object that a call's arguments are, of up to 100 levels.

    Models write arguments that are no object, and clients send them back: they become the member ``arguments`` of one,
    since templates expect an object, and the conversation can go on.
    """
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) and _is_shallow(parsed) else {"arguments": arguments}


def _is_shallow(value: object) -> bool:
    """Whether templates can go through it, which they do recursively."""
    level: list[object] = [value]
    for _ in range(_MOST_LEVELS):
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
    return not level


def _items(value: dict[Any, Any] | list[Any]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


def _template_message(message: ChatMessage, place: str) -> dict[str, Any]:
    content = message.content
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": joined_text(content, f"{place}.content") if isinstance(content, list) else content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    if message.refusal and plain["content"] is None:
        plain["content"] = message.refusal
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": parsed_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return {key: value for key, value in plain.items() if value is not None}
