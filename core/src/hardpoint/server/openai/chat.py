"""``/v1/chat/completions``."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from hardpoint.engine.outputs import PositionLogprobs, RequestOutput
from hardpoint.server.errors import ApiError
from hardpoint.server.fields import (
    IgnoredFields,
    NumLogprobs,
    SamplingFields,
    StreamOptions,
    TreatmentFields,
    VllmFields,
)
from hardpoint.server.openai.format import ResponseFormat
from hardpoint.server.openai.logprobs import chat_logprobs, prompt_logprobs, tokenizer_of
from hardpoint.server.openai.messages import (
    ChatMessage,
    NamedTool,
    Tool,
    template_messages,
    template_tools,
    tool_choice,
)
from hardpoint.server.openai.routed_experts import routed_experts
from hardpoint.server.openai.usage import usage_body, usage_wishes
from hardpoint.server.requests import (
    JsonRoute,
    check_best_of,
    check_stream_options,
    checked_template_kwargs,
    data_parallel_rank,
    request_id,
)
from hardpoint.server.service import Service, ServiceOf
from hardpoint.server.turn import CompletionUpdate, Message, Turn, TurnRequest
from hardpoint.server.watched import EventStream, JsonAnswer, data_event
from hardpoint_plugin_api import ContentDelta, ParserEvent, ReasoningDelta, ToolCallDelta, ToolCallStart

_HOLE = "\0choices"
"""Stands in the text around a chunk where its choices go; no name of a model has it."""

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


class ChatRequest(SamplingFields, TreatmentFields, VllmFields, IgnoredFields):
    """A conversation to continue. ``docs/serving.md`` has a line on every field."""

    model: str | None = None
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    return_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    best_of: int | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    verbosity: str | None = None
    prompt_cache_retention: str | None = None

    def to_turn(self, service: Service) -> TurnRequest:
        """The request to the engine. Raises ApiError and RequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        check_stream_options(self.stream_options, self.stream)
        check_best_of(self.best_of, self.n)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(
                400,
                "add_generation_prompt and continue_final_message exclude each other; set one",
                param="continue_final_message",
            )
        tools = template_tools(self.tools)
        kwargs = checked_template_kwargs(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        if self.documents is not None:
            kwargs["documents"] = self.documents
        adds = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return TurnRequest(
            template_messages(self.messages),
            self.sampling_params(
                service.host.default_params(),
                max_tokens=self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                return_routed_experts=bool(self.return_routed_experts),
            ),
            tools,
            tool_choice(self.tool_choice, has_tools=bool(tools), parallel=self.parallel_tool_calls),
            self.structure(None if self.response_format is None else self.response_format.structure()),
            kwargs | {"add_generation_prompt": adds, "continue_final_message": bool(self.continue_final_message)},
            self.priority or 0,
            self.cache_salt,
            add_special_tokens=bool(self.add_special_tokens),
        )


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, service: ServiceOf) -> Response:
    """Continue a conversation."""
    model = service.check_model(body.model)
    own_id, rank = body.request_id or request_id(request), data_parallel_rank(request)
    answer = _Answer(body, model, service, own_id)
    asked = replace(body.to_turn(service), adapter=service.adapter(model), request_id=own_id, data_parallel_rank=rank)
    turn = await Turn.admit(asked, service)
    if body.stream:
        return EventStream(request, answer.events(turn), data_event)
    return JsonAnswer(lambda: answer.whole(turn))


class _Answer:
    """Writes one request's answer."""

    def __init__(self, body: ChatRequest, model: str, service: Service, own_id: str) -> None:
        self._body, self._service = body, service
        self._tells_reasoning = body.include_reasoning is not False
        self._head = {"id": f"chatcmpl-{own_id}", "created": int(time.time()), "model": model}

    async def whole(self, turn: Turn) -> dict[str, Any]:
        async with turn:
            messages = await turn.messages()
            return {
                **self._head,
                "object": "chat.completion",
                "choices": [self._choice(index, message) for index, message in enumerate(messages)],
                "usage": usage_body(turn.usage),
                "system_fingerprint": None,
                "service_tier": None,
                **self._about_prompt(turn),
            }

    def _about_prompt(self, turn: Turn) -> dict[str, Any]:
        """The parts of the prompt that an answer returns: once for all choices."""
        about: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(turn.prompt_logprobs)
        if self._body.return_token_ids:
            about["prompt_token_ids"] = turn.prompt_token_ids
        if self._body.return_prompt_text:
            about["prompt_text"] = turn.prompt_text
        return about

    def _logprobs(self, positions: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        by_id = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(positions, self._body.top_logprobs or 0, tokenizer_of(self._service), by_id=by_id)

    def _choice(self, index: int, message: Message) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning and self._tells_reasoning:
            said |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if message.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
            said["content"] = message.content or None
        choice: dict[str, Any] = {
            "index": index,
            "message": said,
            "logprobs": self._logprobs(message.logprobs),
            "finish_reason": message.finish_reason,
            "stop_reason": message.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = message.token_ids
        if self._body.return_routed_experts:
            choice["routed_experts"] = routed_experts(message.routed_experts)
        return choice

    async def events(self, turn: Turn) -> AsyncGenerator[bytes, None]:
        """The stream: plain content, most of all events, is put between two texts made beforehand."""
        wants_usage, counts = usage_wishes(self._body.stream_options)
        head = self._head | {"object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})
        before, after = _around(head)
        is_plain = not (self._body.logprobs or self._body.return_token_ids)
        wants_scores = self._body.prompt_logprobs is not None
        begun: set[int] = set()
        held: RequestOutput | None = None
        async with turn, aclosing(turn.grown()) as grown:
            async for _, output in grown:
                if held is not None:
                    held.extend(output)
                    output, held = held, None
                if wants_scores and turn.prompt_logprobs is None and not output.finished:
                    held = output  # another choice was faster than the first, which alone scores the prompt
                    continue
                is_first, chunks = not begun, []
                for step in turn.take(output):
                    if not self._tells_reasoning:
                        step.events = [event for event in step.events if not isinstance(event, ReasoningDelta)]
                    if step.choice not in begun:
                        begun.add(step.choice)
                        chunks.append(_full_chunk(step.choice, {"role": "assistant", "content": ""}))
                    if is_plain and step.finish_reason is None:
                        chunks += [chunk for event in step.events if (chunk := _chunk(step.choice, event))]
                    else:
                        chunks += self._full_chunks(step)
                if counts:
                    before, after = _around(head | {"usage": usage_body(turn.usage)})
                if chunks:
                    written = [before + chunk + after for chunk in chunks]
                    if is_first and (about := self._about_prompt(turn)):
                        written[0] = chunks[0].join(_around(head | about))
                    yield b"".join(written)
            if wants_usage:
                yield data_event(head | {"choices": [], "usage": usage_body(turn.usage)})
        yield b"data: [DONE]\n\n"

    def _full_chunks(self, step: CompletionUpdate) -> list[bytes]:
        """The last of a step's chunks carries what belongs to the whole step."""
        deltas = [delta for event in step.events if (delta := _delta(event))] or [{}]
        rest: dict[str, Any] = {"finish_reason": step.finish_reason}
        if step.finish_reason is not None:
            rest["stop_reason"] = step.delta.stop_reason
            if self._body.return_routed_experts:
                rest["routed_experts"] = routed_experts(step.delta.routed_experts)
        rest["logprobs"] = self._logprobs(step.delta.logprobs)
        if self._body.return_token_ids:
            rest["token_ids"] = step.delta.token_ids
        return [
            *(_full_chunk(step.choice, delta) for delta in deltas[:-1]),
            _full_chunk(step.choice, deltas[-1], **rest),
        ]


def _around(head: dict[str, Any]) -> list[bytes]:
    """The JSON before a chunk's choice, and behind it."""
    return data_event(head | {"choices": [_HOLE]}).split(quoted(_HOLE).encode())


def _chunk(choice: int, event: ParserEvent) -> bytes:
    """One event as a choice of a chunk; nothing for an event that the protocol does not have."""
    if type(event) is ContentDelta:
        text = quoted(event.text)
        return f'{{"index":{choice},"delta":{{"content":{text}}},"logprobs":null,"finish_reason":null}}'.encode()
    if type(event) is ToolCallDelta:
        text = quoted(event.arguments)
        return (
            f'{{"index":{choice},"delta":{{"tool_calls":[{{"index":{event.index},"function":{{"arguments":{text}}}}}]}},'
            '"logprobs":null,"finish_reason":null}'
        ).encode()
    delta = _delta(event)
    return _full_chunk(choice, delta) if delta else b""


def _full_chunk(choice: int, delta: dict[str, Any], **rest: Any) -> bytes:
    whole = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | rest
    return json.dumps(whole, separators=(",", ":")).encode()


def _delta(event: ParserEvent) -> dict[str, Any]:
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.call_id, "type": "function", "function": function}]}
    if isinstance(event, ToolCallDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
    return {}
