"""The blocks that Anthropic's messages are made of, and how chat templates know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from hardpoint.server.errors import ApiError
from hardpoint.server.fields import ProtocolModel


class CacheControl(ProtocolModel):
    """Changes nothing: every prompt's prefix is cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(ProtocolModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ToolUseBlock(ProtocolModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(ProtocolModel):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(ProtocolModel):
    """Thinking that is encrypted: left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ForeignBlock(ProtocolModel):
    """A block of a known type that is not supported: refused by name."""

    type: Literal["image", "document", "search_result"]
    source: Any = None
    title: Any = None
    context: Any = None
    content: Any = None
    citations: Any = None
    cache_control: CacheControl | None = None


class ToolResultBlock(ProtocolModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ForeignBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ForeignBlock,
    Field(discriminator="type"),
]


class InputMessage(ProtocolModel):
    """A message of the user's or the assistant's."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def template_messages(
    system: str | Sequence[TextBlock] | None, messages: Sequence[InputMessage]
) -> list[dict[str, Any]]:
    """The messages as templates know them: results of calls are messages of their own, before the text beside them.

    Raises ApiError for a block that is no text, or that its role does not have.
    """
    said = system if isinstance(system, str) or system is None else "\n".join(block.text for block in system)
    plain: list[dict[str, Any]] = [] if said is None else [{"role": "system", "content": said}]
    for number, message in enumerate(messages):
        place = f"messages[{number}].content"
        if isinstance(message.content, str):
            plain.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            plain.append(_assistant(message.content, place))
        else:
            plain += _user(message.role, message.content, place)
    return plain


def _assistant(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(block, "an assistant's", f"{place}[{number}]")
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _user(role: str, blocks: Sequence[Block], place: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    texts = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if isinstance(block, ToolResultBlock):
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, where)})
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            raise _misplaced(block, "a user's", where)
    return [*results, {"role": role, "content": "\n".join(texts)}] if texts or not results else results


def _result(block: ToolResultBlock, place: str) -> str:
    if isinstance(block.content, str) or block.content is None:
        return block.content or ""
    texts = []
    for number, part in enumerate(block.content):
        if not isinstance(part, TextBlock):
            raise _misplaced(part, "a result's", f"{place}.content[{number}]")
        texts.append(part.text)
    return "\n".join(texts)


def _misplaced(block: ProtocolModel, whose: str, place: str) -> ApiError:
    kind = getattr(block, "type", "")
    if isinstance(block, ForeignBlock):
        why = f"the model reads text alone, and nothing is fetched for a client; leave out the block of type {kind!r}"
    else:
        why = f"a block of type {kind!r} is no part of {whose} message"
    return ApiError(400, f"{place}: {why}", param=place)
