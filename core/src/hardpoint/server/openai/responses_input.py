"""The items that ``/v1/responses`` takes, and how chat templates know them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from hardpoint.server.errors import ApiError
from hardpoint.server.fields import ProtocolModel, UnknownPart
from hardpoint.server.openai.messages import check_names, function_tools, is_function, parsed_arguments
from hardpoint.server.openai.tool_servers import McpTool, OfferedTool


class TextContent(ProtocolModel):
    """Text that was put in or out."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalContent(ProtocolModel):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    refusal: str


class ForeignContent(ProtocolModel):
    """A part of a known type that is not supported: refused by name."""

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
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Content]
    id: str | None = None
    status: str | None = None


class ReasoningText(ProtocolModel):
    """Reasoning of the model."""

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


class McpListItem(ProtocolModel):
    """The tools of a tool server, as a response told of them."""

    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[Any]
    id: str | None = None
    error: str | None = None


class McpCallItem(ProtocolModel):
    """A call of a tool server's tool, and what it came to."""

    type: Literal["mcp_call"]
    id: str
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None
    status: str | None = None
    approval_request_id: str | None = None

    @property
    def result(self) -> str:
        """The text that the model is told."""
        return (self.output or "") if self.error is None else error_text(self.error)


class ApprovalRequestItem(ProtocolModel):
    """A call that the client has to approve."""

    type: Literal["mcp_approval_request"]
    id: str
    server_label: str
    name: str
    arguments: str


class ApprovalResponseItem(ProtocolModel):
    """The client's answer to a request for approval."""

    type: Literal["mcp_approval_response"]
    approval_request_id: str
    approve: bool
    reason: str | None = None
    id: str | None = None


def error_text(error: Any) -> str:
    """The text that the model is told of a call's error, which is in the form of OpenAI's API or a text."""
    said = error.get("message") or error.get("content") if isinstance(error, Mapping) else error
    return f"error: {said if isinstance(said, str) else json.dumps(said)}"


def _kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[McpListItem, Tag("mcp_list_tools")]
    | Annotated[McpCallItem, Tag("mcp_call")]
    | Annotated[ApprovalRequestItem, Tag("mcp_approval_request")]
    | Annotated[ApprovalResponseItem, Tag("mcp_approval_response")],
    Discriminator(_kind),
]


class FlatFunction(ProtocolModel):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _kind_of_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return "mcp" if kind == "mcp" else is_function(tool)


_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])

FlatTool = Annotated[
    Annotated[FlatFunction, Tag("function")] | Annotated[McpTool, Tag("mcp")] | Annotated[UnknownPart, Tag("unknown")],
    Discriminator(_kind_of_tool),
]


def template_messages(
    given: str | Sequence[InputItem],
    instructions: str | None,
    history: Sequence[InputItem] = (),
    made: Sequence[InputItem] = (),
) -> list[dict[str, Any]]:
    """The items ``given`` as messages that templates know, between those of ``history`` and those ``made`` since.

    Calls, and reasoning before them, belong to one assistant's message. Raises ApiError for what is no text.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    own = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    everything = [*history, *own, *made]
    answers = approvals(everything)
    for number, item in enumerate(everything, -len(history)):
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
        elif isinstance(item, McpCallItem):
            _add_call(messages, item.id, item)
            messages.append({"role": "tool", "tool_call_id": item.id, "content": item.result})
        elif isinstance(item, ApprovalRequestItem):
            answer = answers.get(item.id)
            if answer is not None and not answer.approve:  # an approved call is an item of its own
                _add_call(messages, item.id, item)
                said = "error: the user did not approve this call" + (f": {answer.reason}" if answer.reason else "")
                messages.append({"role": "tool", "tool_call_id": item.id, "content": said})
        elif isinstance(item, ReasoningItem):
            parts = item.content or item.summary or ()
            _assistant(messages)["reasoning_content"] = "".join(part.text for part in parts)
        elif isinstance(item, CallItem):
            _add_call(messages, item.call_id, item)
    return messages


def approvals(items: Sequence[InputItem]) -> dict[str, ApprovalResponseItem]:
    """The client's answers to requests for approval, by their ids."""
    return {item.approval_request_id: item for item in items if isinstance(item, ApprovalResponseItem)}


def _add_call(messages: list[dict[str, Any]], call_id: str, item: CallItem | McpCallItem | ApprovalRequestItem) -> None:
    function = {"name": item.name, "arguments": parsed_arguments(item.arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being made, or a new one."""
    if (message := _unfinished(messages)) is None:
        message = {"role": "assistant"}
        messages.append(message)
    return message


def template_tools(tools: Sequence[FlatTool] | None, offered: Iterable[OfferedTool] = ()) -> list[dict[str, Any]]:
    """The tools, and those that tool servers have ``offered``, in the form of chat completions, which templates know.

    Raises ApiError where two have one name.
    """
    functions = function_tools([tool for tool in tools or () if isinstance(tool, FlatFunction)])
    functions += [tool.as_function() for tool in offered]
    check_names([tool["function"]["name"] for tool in functions])
    return functions


def as_items(values: Sequence[dict[str, Any]]) -> list[InputItem]:
    """Items of a response, as those of a request."""
    return _ITEMS.validate_python(values)


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
