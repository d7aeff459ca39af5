"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from hardpoint.server.anthropic.blocks import CacheControl, InputMessage, TextBlock, template_messages
from hardpoint.server.errors import ApiError, JsonResponse
from hardpoint.server.fields import MAX_STOPS, ProtocolModel, TreatmentFields, UnknownPart
from hardpoint.server.generation import Usage
from hardpoint.server.items import Change, Item, Items
from hardpoint.server.openai.messages import function_tools, is_function
from hardpoint.server.requests import JsonRoute, checked_template_kwargs, data_parallel_rank, request_id
from hardpoint.server.service import Service, ServiceOf
from hardpoint.server.turn import ToolChoice, Turn, TurnRequest
from hardpoint.server.watched import EventStream, JsonAnswer, named_event
from hardpoint_plugin_api import StructuredOutput

router = APIRouter(route_class=JsonRoute, tags=["Anthropic"])


class CustomTool(ProtocolModel):
    """A tool that the model may use; ``input_schema`` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = None

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema, under the name that other protocols have for it."""
        return self.input_schema


AnthropicTool = Annotated[
    Annotated[CustomTool, Tag("function")] | Annotated[UnknownPart, Tag("unknown")], Discriminator(is_function)
]


class AnthropicToolChoice(ProtocolModel):
    """Whether tools are used: any is at least one, tool is the one of that name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ProtocolModel):
    """Whether the model thinks first, for chat templates that know ``enable_thinking``. There is no budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class JsonFormat(ProtocolModel):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ProtocolModel):
    """The form of the answer; ``effort`` is given to the chat template as ``reasoning_effort``."""

    format: JsonFormat | None = None
    effort: str | None = None


class Metadata(ProtocolModel):
    """Changes nothing."""

    user_id: str | None = None


class Conversation(ProtocolModel):
    """A conversation whose tokens are counted, or which is continued."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools in the form that templates know. Raises ApiError where two have one name."""
        return function_tools([tool for tool in self.tools or () if isinstance(tool, CustomTool)])

    @property
    def template_options(self) -> dict[str, Any]:
        """Keywords of ChatTemplate.render. A last message of the assistant's is continued."""
        options = checked_template_kwargs(self.chat_template_kwargs)
        if self.thinking is not None:
            options["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        if self.messages[-1].role == "assistant":
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        return options


class MessagesRequest(Conversation, TreatmentFields):
    """A conversation to continue. ``docs/serving.md`` has a line on every field."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None

    def to_turn(self, service: Service) -> TurnRequest:
        """The request to the engine. Raises ApiError and RequestError."""
        said: Mapping[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
        }
        own = {name: value for name, value in said.items() if value is not None}
        form = None if self.output_config is None else self.output_config.format
        return TurnRequest(
            template_messages(self.system, self.messages),
            service.params(max_tokens=self.max_tokens, **own),
            self.template_tools,
            self._choice(),
            None if form is None else StructuredOutput.json_schema(form.schema_),
            self.template_options,
            self.priority or 0,
            self.cache_salt,
        )

    def _choice(self) -> ToolChoice:
        choice = self.tool_choice
        if choice is None:
            return ToolChoice()
        if choice.type in ("any", "tool") and not self.template_tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if (choice.type == "tool") != (choice.name is not None):
            raise ApiError(400, "tool_choice: name goes with the type tool", param="tool_choice.name")
        parallel = not choice.disable_parallel_tool_use
        return ToolChoice({"any": "required", "tool": "function"}.get(choice.type, choice.type), choice.name, parallel)


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request, service: ServiceOf) -> Response:
    """Continue a conversation."""
    model = service.check_model(body.model)
    own_id, rank = request_id(request), data_parallel_rank(request)
    answer = _Answer(model, own_id)
    asked = replace(body.to_turn(service), adapter=service.adapter(model), request_id=own_id, data_parallel_rank=rank)
    turn = await Turn.admit(asked, service)
    if body.stream:
        return EventStream(request, answer.events(turn), named_event)
    return JsonAnswer(lambda: answer.whole(turn))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Conversation, service: ServiceOf) -> JsonResponse:
    """How many tokens a conversation has as the model gets it."""
    service.check_model(body.model)
    plain, tools = template_messages(body.system, body.messages), body.template_tools
    options = body.template_options | ({"tools": tools} if tools else {})
    prompt = await service.host.engine.read_chat(plain, is_limited=False, **options)
    return JsonResponse({"input_tokens": len(prompt["prompt_token_ids"])})


class _Answer:
    """Writes one request's answer."""

    def __init__(self, model: str, own_id: str) -> None:
        self._items = Items()
        self._head = {"id": f"msg_{own_id}", "type": "message", "role": "assistant", "model": model}

    async def whole(self, turn: Turn) -> dict[str, Any]:
        async with turn:
            end = _UNFINISHED
            async with aclosing(turn.grown()) as grown:
                async for _, output in grown:
                    for step in turn.take(output):
                        for _change in self._items.take(step.events):
                            pass
                        if step.finish_reason is not None:
                            end = _end(step.finish_reason, step.delta.stop_reason)
            content = [_block(item, item.text) for item in self._items.all]
            return self._head | {"content": content} | end | {"usage": _usage(turn.usage)}

    async def events(self, turn: Turn) -> AsyncGenerator[bytes, None]:
        async with turn, aclosing(turn.grown()) as grown:
            begun = False
            async for _, output in grown:
                written = []
                if not begun:
                    begun = True
                    head = self._head | {"content": []} | _UNFINISHED | {"usage": _usage(turn.usage)}
                    written.append(named_event({"type": "message_start", "message": head}))
                for step in turn.take(output):
                    written += map(_written, self._items.take(step.events))
                    if step.finish_reason is not None:
                        written += map(_written, self._items.finish())
                        end = _end(step.finish_reason, step.delta.stop_reason)
                        usage = _usage(turn.usage)
                        written.append(named_event({"type": "message_delta", "delta": end, "usage": usage}))
                        written.append(named_event({"type": "message_stop"}))
                if written:
                    yield b"".join(written)


_UNFINISHED: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _written(change: Change) -> bytes:
    """One change as an event; the usual one is written without building anything."""
    index = change.item.index
    if change.kind == "more":
        kind, field = _DELTAS[change.item.kind]
        return (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{index},"delta":{{"type":"{kind}","{field}":{quoted(change.text)}}}}}\n\n'
        ).encode()
    if change.kind == "begin":
        return named_event({"type": "content_block_start", "index": index, "content_block": _block(change.item, "")})
    return named_event({"type": "content_block_stop", "index": index})


def _block(item: Item, text: str) -> dict[str, Any]:
    if item.kind == "call":
        return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": _arguments(text)}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _arguments(text: str) -> Any:
    """The object that a call's arguments are. One that was cut off is given as it stands, under ``partial_json``."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"partial_json": text}
    return parsed if isinstance(parsed, dict) else {"value": parsed}


def _end(finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[finish_reason]
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """As Anthropic counts: input tokens are those that were not found in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
