"""``/v1/responses``: a conversation sent whole, or the next items of one that is kept."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from hardpoint.engine.outputs import PositionLogprobs
from hardpoint.server.errors import ApiError, JsonResponse
from hardpoint.server.fields import IgnoredFields, NumLogprobs, ProtocolModel, SamplingFields, TreatmentFields
from hardpoint.server.items import Change, Item, Items
from hardpoint.server.openai.format import TextFormatOfResponses
from hardpoint.server.openai.kept_responses import Keeper, history
from hardpoint.server.openai.logprobs import chat_logprobs, tokenizer_of
from hardpoint.server.openai.responses_input import FlatFunction, FlatTool, InputItem, template_messages, template_tools
from hardpoint.server.requests import JsonRoute, checked_template_kwargs, request_id
from hardpoint.server.service import Service, ServiceOf
from hardpoint.server.turn import ToolChoice, Turn, TurnRequest
from hardpoint.server.watched import EventStream, JsonAnswer, named_event

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

_LOGPROBS = "message.output_text.logprobs"
_REFUSED = {
    "conversation": "there are no conversations; give the previous_response_id, or all as input",
    "prompt": "no prompts are stored; send the text as input",
}


class NamedFunctionTool(ProtocolModel):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextSettings(ProtocolModel):
    """What the text must look like."""

    format: TextFormatOfResponses | None = None
    verbosity: str | None = None


class ReasoningSettings(ProtocolModel):
    """``effort`` is given to the chat template; there are no summaries."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(ProtocolModel):
    """Changes nothing."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, TreatmentFields, IgnoredFields):
    """A conversation to continue. ``docs/serving.md`` has a line on every field."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True where the text's log-probabilities are wanted."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def to_turn(self, service: Service, history: Sequence[InputItem] = ()) -> TurnRequest:
        """What the engine is asked, behind the items ``history``. Raises ApiError and RequestError."""
        for name, why in _REFUSED.items():
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported: {why}", param=name)
        if self.n not in (None, 1):
            raise ApiError(400, "n: a response is one completion; /v1/chat/completions returns several", param="n")
        if self.truncation == "auto":
            raise ApiError(400, "truncation: nothing is cut from a conversation; leave it out", param="truncation")
        kwargs = checked_template_kwargs(self.chat_template_kwargs)
        if self.reasoning is not None and self.reasoning.effort is not None:
            kwargs["reasoning_effort"] = self.reasoning.effort
        form = None if self.text is None else self.text.format
        return TurnRequest(
            template_messages(self.input, self.instructions, history),
            self.sampling_params(
                service.host.default_params(),
                max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            ),
            template_tools(self.tools),
            self._choice(),
            self.structure(None if form is None else form.structure()),
            kwargs,
            self.priority or 0,
            self.cache_salt,
        )

    def _choice(self) -> ToolChoice:
        choice, parallel = self.tool_choice, self.parallel_tool_calls is not False
        has_tools = any(isinstance(tool, FlatFunction) for tool in self.tools or ())
        if not has_tools and (isinstance(choice, NamedFunctionTool) or choice == "required"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if isinstance(choice, NamedFunctionTool):
            return ToolChoice("function", choice.name, parallel)
        return ToolChoice(choice or "auto", None, parallel)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request, service: ServiceOf) -> Response:
    """Continue a conversation."""
    model = service.check_model(body.model)
    own_id = uuid.uuid4().hex if body.background else request_id(request)  # a client may send its id again
    keeper = Keeper.of(request, service, body.input, body.previous_response_id, store=body.store is not False)
    if body.background:
        _check_background(body, keeper)
    before = await history(request, service, body.previous_response_id)
    asked = replace(body.to_turn(service, before), adapter=service.adapter(model), request_id=own_id)
    answer = _Answer(body, model, asked, service, keeper)
    turn = await Turn.admit(asked, service)
    if body.background:
        await keeper.in_background(service, answer.begun("queued"), lambda: answer.whole(turn))
        return JsonResponse(answer.begun("queued"))
    if body.stream:
        return EventStream(request, answer.events(turn), answer.failed)
    return JsonAnswer(lambda: answer.kept(turn))


def _check_background(body: ResponsesRequest, keeper: Keeper) -> None:
    if not keeper.keeps:
        raise ApiError(400, "background: the response has to be kept; leave out store", param="background")
    if body.stream:
        raise ApiError(400, "background: a response is streamed, or made in the background; give one", param="stream")


class _Answer:
    """Writes one request's answer."""

    def __init__(
        self, body: ResponsesRequest, model: str, asked: TurnRequest, service: Service, keeper: Keeper
    ) -> None:
        self._keeper = keeper
        self._body, self._service, self._items, self._ids = body, service, Items(), list[str]()
        self._positions: list[PositionLogprobs] = []
        self._number = 0
        self._head = {
            "id": f"resp_{asked.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": asked.tool_choice.parallel,
            "previous_response_id": body.previous_response_id,
            "background": bool(body.background),
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": keeper.keeps,
            "temperature": asked.params.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": "auto" if body.tool_choice is None else body.model_dump()["tool_choice"],
            "tools": [tool.model_dump() for tool in body.tools or () if isinstance(tool, FlatFunction)],
            "top_p": asked.params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def begun(self, status: str) -> dict[str, Any]:
        """The response before there is any output."""
        return self._head | {"status": status, "incomplete_details": None, "output": [], "usage": None}

    async def kept(self, turn: Turn) -> dict[str, Any]:
        """The whole response, once it is kept."""
        whole = await self.whole(turn)
        await self._keeper.keep(whole)
        return whole

    async def whole(self, turn: Turn) -> dict[str, Any]:
        """The whole response."""
        async with turn, aclosing(turn.grown()) as grown:
            reason = None
            async for _, output in grown:
                for step in turn.take(output):
                    self._note(self._items.take(step.events))
                    self._positions += step.delta.logprobs or ()
                    reason = step.finish_reason
            self._note(self._items.finish())
            return self._response(turn, reason)

    async def events(self, turn: Turn) -> AsyncGenerator[bytes, None]:
        """The stream."""
        async with turn, aclosing(turn.grown()) as grown:
            begun = False
            async for _, output in grown:
                written = []
                if not begun:
                    begun = True
                    written += [self._event("response.created"), self._event("response.in_progress")]
                for step in turn.take(output):
                    self._positions += step.delta.logprobs or ()
                    written += map(self._written, self._items.take(step.events))
                    if step.finish_reason is not None:
                        written += map(self._written, self._items.finish())
                        whole = self._response(turn, step.finish_reason)
                        await self._keeper.keep(whole)
                        written.append(self._named(f"response.{whole['status']}", response=whole))
                if written:
                    yield b"".join(written)

    def failed(self, error: dict[str, Any]) -> bytes:
        """The event of a failure."""
        said = error["error"]
        return self._named("error", code=said["code"], message=said["message"], param=said["param"])

    def _response(self, turn: Turn, reason: str | None) -> dict[str, Any]:
        usage = turn.usage
        is_cut = reason == "length"
        return self._head | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._whole_item(item, is_cut=is_cut) for item in self._items.all],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _note(self, changes: Iterator[Change]) -> None:
        for change in changes:
            if change.kind == "begin":
                self._ids.append(_new_id(change.item))

    def _event(self, kind: str) -> bytes:
        """An event before there is any output."""
        return self._named(kind, response=self.begun("in_progress"))

    def _written(self, change: Change) -> bytes:
        item = change.item
        if change.kind == "begin":
            self._ids.append(_new_id(item))
            added = self._named(
                "response.output_item.added",
                output_index=item.index,
                item=self._item(item, [], status="in_progress", arguments=""),
            )
            if item.kind != "text":
                return added
            return added + self._named("response.content_part.added", **self._at(item), part=_text_part("", []))
        if change.kind == "more":
            return self._delta(item, change.text)
        whole = self._whole_item(item, is_cut=False)
        at = self._at(item)
        if item.kind == "call":
            del at["content_index"]
            ends = [self._named("response.function_call_arguments.done", **at, name=item.name, arguments=item.text)]
        elif item.kind == "reasoning":
            ends = [self._named("response.reasoning_text.done", **at, text=item.text)]
        else:
            part = whole["content"][0]
            ends = [
                self._named("response.output_text.done", **at, text=item.text, logprobs=part["logprobs"]),
                self._named("response.content_part.done", **at, part=part),
            ]
        return b"".join([*ends, self._named("response.output_item.done", output_index=item.index, item=whole)])

    def _delta(self, item: Item, text: str) -> bytes:
        """More of an item: most of all events, so written without building anything."""
        kind, tail = _DELTAS[item.kind]
        number, self._number = self._number, self._number + 1
        return (
            f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},"item_id":"{self._ids[item.index]}",'
            f'"output_index":{item.index},"delta":{quoted(text)}{tail}}}\n\n'
        ).encode()

    def _named(self, kind: str, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": kind, "sequence_number": number} | values)

    def _at(self, item: Item) -> dict[str, Any]:
        return {"item_id": self._ids[item.index], "output_index": item.index, "content_index": 0}

    def _whole_item(self, item: Item, *, is_cut: bool) -> dict[str, Any]:
        is_last = is_cut and item is self._items.all[-1]
        scored: Sequence[Any] = ()
        if self._body.wants_logprobs and item.kind == "text":
            num_top = self._body.top_logprobs or 0
            scored = chat_logprobs(self._positions, num_top, tokenizer_of(self._service))["content"]
        part = {"type": "reasoning_text", "text": item.text} if item.kind == "reasoning" else None
        content = [part or _text_part(item.text, scored)]
        return self._item(item, content, status="incomplete" if is_last else "completed", arguments=item.text)

    def _item(self, item: Item, content: list[Any], *, status: str, arguments: str) -> dict[str, Any]:
        head = {"id": self._ids[item.index], "status": status}
        if item.kind == "call":
            named = {"call_id": item.call_id, "name": item.name, "arguments": arguments}
            return head | {"type": "function_call"} | named
        if item.kind == "reasoning":
            return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return head | {"type": "message", "role": "assistant", "content": content}


_DELTAS = {
    "text": ("response.output_text.delta", ',"content_index":0,"logprobs":[]'),
    "reasoning": ("response.reasoning_text.delta", ',"content_index":0'),
    "call": ("response.function_call_arguments.delta", ""),
}
"""The name of an item's event for more of it, and what the event ends with."""


def _new_id(item: Item) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[item.kind] + uuid.uuid4().hex


def _text_part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
