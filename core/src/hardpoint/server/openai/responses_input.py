"""The items that ``/v1/responses`` takes, and how chat templates know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hardpoint.server.errors import ApiError
from hardpoint.server.fields import ProtocolModel, UnknownPart
from hardpoint.server.openai.messages import function_tools, is_function, parsed_arguments


class TextContent(ProtocolModel):
    """Text that was put in or out."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalContent(ProtocolModel):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class ForeignContent(ProtocolModel):
    """Known, so that it can be refused by name."""

    type: Literal["input_image", "input_file", "input_audio"]
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None
    filename: Any = None
    input_audio: Any = None


Content = Annotated[TextContent | RefusalContent | ForeignContent, Field(discriminator="type")]


class MessageItem(ProtocolModel):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(ProtocolModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(ProtocolModel):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Content]
    id: str | None = None
    status: str | None = None


class ReasoningText(ProtocolModel):
    """What the model said to itself."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ProtocolModel):
    """The same, as an item."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


def _kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FlatFunction(ProtocolModel):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


FlatTool = Annotated[
    Annotated[FlatFunction, Tag("function")] | Annotated[UnknownPart, Tag("unknown")], Discriminator(is_function)
]


def template_messages(
    given: str | Sequence[InputItem], instructions: str | None, history: Sequence[InputItem] = ()
) -> list[dict[str, Any]]:
    """The items ``given`` as messages that templates know, behind those of ``history``.

    Calls, and reasoning before them, belong to one assistant's message. Raises ApiError for what is no text.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    own = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    for number, item in enumerate([*history, *own], -len(history)):
        place = f"input[{number}]"
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            text = _text(item.content, f"{place}.content")
            if role == "assistant" and (unfinished := _unfinished(messages)) and "content" not in unfinished:
                unfinished["content"] = text
            else:
                messages.append({"role": role, "content": text})
        elif isinstance(item, CallOutputItem):
            text = _text(item.output, f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        else:
            message = _unfinished(messages)
            if message is None:
                message = {"role": "assistant"}
                messages.append(message)
            if isinstance(item, ReasoningItem):
                parts = item.content or item.summary or ()
                message["reasoning_content"] = "".join(part.text for part in parts)
            else:
                arguments = parsed_arguments(item.arguments)
                call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}
                message.setdefault("tool_calls", []).append(call)
    return messages


def template_tools(tools: Sequence[FlatTool] | None) -> list[dict[str, Any]]:
    """The tools in the form of chat completions, which templates know. Raises ApiError where two have one name."""
    return function_tools([tool for tool in tools or () if isinstance(tool, FlatFunction)])


def _unfinished(messages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _text(content: str | Sequence[Content], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, ForeignContent):
            raise ApiError(
                400,
                f"{place}[{number}]: the model reads text alone, and nothing is fetched for a client; "
                f"leave out the part of type {part.type!r}",
                param=f"{place}[{number}]",
            )
        texts.append(part.refusal if isinstance(part, RefusalContent) else part.text)
    return "\n".join(texts)
