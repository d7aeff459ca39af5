"""``/v1/responses``: a conversation sent whole, or the next items of one that is kept."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from hardpoint.server.errors import ApiError, JsonResponse
from hardpoint.server.fields import IgnoredFields, NumLogprobs, ProtocolModel, SamplingFields, TreatmentFields
from hardpoint.server.openai.format import TextFormatOfResponses
from hardpoint.server.openai.kept_responses import Keeper, history
from hardpoint.server.openai.response_answer import Answer
from hardpoint.server.openai.responses_input import (
    FlatFunction,
    FlatTool,
    InputItem,
    as_items,
    template_messages,
    template_tools,
)
from hardpoint.server.openai.tool_servers import McpTool, OfferedTool, ToolServers, approved_calls
from hardpoint.server.requests import JsonRoute, checked_template_kwargs, data_parallel_rank
from hardpoint.server.service import Service, ServiceOf
from hardpoint.server.turn import ToolChoice, Turn, TurnRequest
from hardpoint.server.watched import EventStream, JsonAnswer

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


class NamedMcpTool(ProtocolModel):
    """The tool of a tool server that must be called; without ``name``, one of the server's."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class TextSettings(ProtocolModel):
    """The form that the text must have."""

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
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | NamedMcpTool | None = None
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

    @property
    def tool_servers(self) -> list[McpTool]:
        """The tool servers that are named in ``tools``."""
        return [tool for tool in self.tools or () if isinstance(tool, McpTool)]

    def to_turn(
        self,
        service: Service,
        history: Sequence[InputItem] = (),
        made: Sequence[InputItem] = (),
        offered: Mapping[str, OfferedTool] = MappingProxyType({}),
    ) -> TurnRequest:
        """The request to the engine, between the items ``history`` and those ``made`` since; ``offered`` are the tools
        of tool servers. Raises ApiError and RequestError."""
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
            template_messages(self.input, self.instructions, history, made),
            self.sampling_params(
                service.host.default_params(),
                max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            ),
            template_tools(self.tools, offered.values()),
            self._choice(offered),
            self.structure(None if form is None else form.structure()),
            kwargs,
            self.priority or 0,
            self.cache_salt,
        )

    def _choice(self, offered: Mapping[str, OfferedTool]) -> ToolChoice:
        choice, parallel = self.tool_choice, self.parallel_tool_calls is not False
        has_tools = offered or any(isinstance(tool, FlatFunction) for tool in self.tools or ())
        is_named = isinstance(choice, NamedFunctionTool | NamedMcpTool)
        if not has_tools and (is_named or choice == "required"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if isinstance(choice, NamedFunctionTool) or (isinstance(choice, NamedMcpTool) and choice.name is not None):
            return ToolChoice("function", choice.name, parallel)
        if isinstance(choice, NamedMcpTool):
            return ToolChoice("required", None, parallel)
        return ToolChoice(choice or "auto", None, parallel)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request, service: ServiceOf) -> Response:
    """Continue a conversation."""
    model = service.check_model(body.model)
    own_id = uuid.uuid4().hex  # not the client's, which may be sent again: stored responses are found by it
    rank = data_parallel_rank(request)
    keeper = Keeper.of(request, service, body.input, body.previous_response_id, store=body.store is not False)
    if body.background and not keeper.keeps:
        raise ApiError(400, "background: the response has to be kept; leave out store", param="background")
    before = await history(request, service, body.previous_response_id)
    servers = await ToolServers.connect(body.tool_servers, service.settings)
    try:
        own = () if isinstance(body.input, str) else body.input
        called = await approved_calls(own, before, servers)

        def ask(made: list[dict[str, Any]]) -> TurnRequest:
            asked = body.to_turn(service, before, as_items([*called, *made]), servers.offered)
            return replace(asked, adapter=service.adapter(model), request_id=own_id, data_parallel_rank=rank)

        asked = ask([])
        answer = Answer(_head(body, model, asked, keeper), asked, ask, service, keeper, servers)
        answer.begin_with([*servers.new_lists(before), *called])
        answer.wants_logprobs, answer.num_top = body.wants_logprobs, body.top_logprobs or 0
        answer.max_calls = body.max_tool_calls
        turn = await Turn.admit(asked, service)
        if body.background and body.stream:
            await keeper.in_background(service, answer.begun("queued"), lambda: answer.logged(turn), answer)
            return EventStream(request, answer.log.follow(0), answer.failed)
        if body.background:
            await keeper.in_background(service, answer.begun("queued"), lambda: answer.whole(turn))
            return JsonResponse(answer.begun("queued"))
    except BaseException:
        await servers.close()
        raise
    if body.stream:
        return EventStream(request, answer.events(turn), answer.failed)
    return JsonAnswer(lambda: answer.kept(turn))


def _head(body: ResponsesRequest, model: str, asked: TurnRequest, keeper: Keeper) -> dict[str, Any]:
    """The fields of a response beside its output."""
    tools = [tool for tool in body.tools or () if isinstance(tool, FlatFunction | McpTool)]
    return {
        "id": f"resp_{asked.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": asked.tool_choice.parallel,
        "previous_response_id": body.previous_response_id,
        "background": bool(body.background),
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": keeper.keeps,
        "temperature": asked.params.temperature,
        "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
        "tool_choice": "auto" if body.tool_choice is None else body.model_dump()["tool_choice"],
        "tools": [tool.told() if isinstance(tool, McpTool) else tool.model_dump() for tool in tools],
        "top_p": asked.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
