"""One assistant's turn: from a conversation with tools to the events that its output is made of.

The chat protocols differ in how they write requests and answers; what lies between is here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hardpoint.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.parsers import OutputParser
from hardpoint.parsers.lark import call_schema, parameters
from hardpoint.server.errors import ApiError
from hardpoint.server.forced_call import AnyCall, OneCall
from hardpoint.server.generation import Cursor, Generation, GenerationRequest, Usage
from hardpoint.server.service import Service
from hardpoint_plugin_api import (
    ContentDelta,
    ParserArgs,
    ParserEvent,
    ReasoningDelta,
    StructuredOutput,
    ToolCallDelta,
    ToolCallStart,
    ToolParser,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class ToolChoice:
    """``mode`` none, auto, required; or function, and then ``name`` is the one that must be called."""

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """True where the output must be a call."""
        return self.mode in ("required", "function")

    @property
    def may_be_several(self) -> bool:
        """True where the output may be several calls; a function that is named is called once."""
        return self.parallel and self.mode != "function"


@dataclass(frozen=True)
class TurnRequest:
    """A conversation and what is wanted of the next turn.

    ``messages`` are as chat templates know them, ``tools`` in the form of OpenAI's chat completions. ``template`` are
    keywords of ChatTemplate.render.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    structured: StructuredOutput | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    adapter: str = ""
    request_id: str = ""
    add_special_tokens: bool = False
    data_parallel_rank: int | None = None


@dataclass
class ToolCall:
    """A call that the model made. ``arguments`` is JSON as the model wrote it."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """One completion's whole turn."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    routed_experts: npt.NDArray[np.int16] | None = None

    def take(self, step: CompletionUpdate) -> None:
        """Add what ``step`` brings."""
        for event in step.events:
            self._take(event)
        self.token_ids += step.delta.token_ids
        if step.delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + step.delta.logprobs
        if step.finish_reason is not None:
            self.finish_reason, self.stop_reason = step.finish_reason, step.delta.stop_reason
            self.routed_experts = step.delta.routed_experts

    def _take(self, event: ParserEvent) -> None:
        if isinstance(event, ContentDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            self.tool_calls.append(ToolCall(event.call_id, event.name))
        elif isinstance(event, ToolCallDelta):
            self.tool_calls[event.index].arguments += event.arguments


@dataclass(slots=True)
class CompletionUpdate:
    """The news of one completion: its parsed ``events``, and the ``delta`` that they are of."""

    choice: int
    events: list[ParserEvent]
    delta: CompletionOutput
    finish_reason: str | None


class Turn:
    """An admitted turn, as an async context manager: leaving it ends what still runs."""

    def __init__(self, generation: Generation, readers: Sequence[Reader], prompt_text: str) -> None:
        """``prompt_text``: the conversation as the chat template wrote it."""
        self._generation, self._readers = generation, readers
        self.prompt_text = prompt_text

    @classmethod
    async def admit(cls, request: TurnRequest, service: Service) -> Self:
        """Render and queue ``request``. Raises ApiError and RequestError for what is wrong with it."""
        engine = service.host.engine
        calls = request.tools and request.tool_choice.mode != "none"
        options = dict(request.template) | ({"tools": request.tools} if request.tools else {})
        is_limited = request.params.truncate_prompt_tokens is None
        prompt = await engine.read_chat(
            request.messages, is_limited=is_limited, add_special_tokens=request.add_special_tokens, **options
        )
        args = ParserArgs(tools=request.tools, prompt=prompt["prompt"], special_tokens=service.host.special_tokens)
        parsers, structure = replace(service.host.parsers, tool=None), None
        if calls:
            tool, structure = _how_to_call(request, service.host.parsers.tool, args)
            parsers = replace(parsers, tool=tool)
        if request.structured is not None:
            if structure is not None:
                raise ApiError(400, "tool_choice and response_format both say what the output must be; give one")
            structure = request.structured
        if structure is not None and parsers.reasoning is not None:
            structure = parsers.reasoning(args).delayed(structure)
        params = request.params if structure is None else replace(request.params, structured=structure)
        if parsers.needs_special_tokens:
            params = replace(params, skip_special_tokens=False)
        generation = await Generation.admit(
            GenerationRequest(
                [prompt],
                params,
                request.priority,
                request.cache_salt,
                request.adapter,
                request.request_id,
                request.data_parallel_rank,
            ),
            service,
        )
        is_parsed = parsers.tool is not None or parsers.reasoning is not None
        readers = [
            Reader(parsers.open(args) if is_parsed else None, parallel=request.tool_choice.may_be_several)
            for _ in range(params.n)
        ]
        return cls(generation, readers, prompt["prompt"])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._generation.__aexit__(kind, error, trace)

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
        return replace(self._generation.usage, reasoning_tokens=reasoning)

    @property
    def prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """The log-probabilities of the prompt, where they were asked for."""
        output = self._generation.outputs[0]
        return None if output is None else output.prompt_logprobs

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens, once the first output is there."""
        output = self._generation.outputs[0]
        return [] if output is None else output.prompt_token_ids

    def grown(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of Generation.grown, for ``take``."""
        return self._generation.grown()

    def take(self, output: RequestOutput) -> list[CompletionUpdate]:
        """The news of each completion. Not a generator: this runs for every token of every stream."""
        steps = []
        for completion in output.outputs:
            reader = self._readers[completion.index]
            delta = reader.cursor.take(completion)
            if delta is not None:
                steps.append(CompletionUpdate(completion.index, reader.read(delta), delta, reader.finish_reason(delta)))
                if reader.has_enough and delta.finish_reason is None:
                    self._generation.stop(completion.index)
        return steps

    async def messages(self) -> list[Message]:
        """The completions' whole turns."""
        messages = [Message() for _ in self._readers]
        async with aclosing(self.grown()) as grown:
            async for _, output in grown:
                for step in self.take(output):
                    messages[step.choice].take(step)
        return messages


class Reader:
    """Parses one completion's text. Without ``parallel`` the output ends, for its readers, before a second call."""

    __slots__ = ("_has_calls", "_num_undecided", "_parallel", "_parser", "cursor", "has_enough", "num_reasoning_tokens")

    def __init__(self, parser: OutputParser | None, *, parallel: bool) -> None:
        """Without ``parser`` text is content."""
        self.cursor = Cursor()
        self._parser, self._parallel, self._has_calls = parser, parallel, False
        self.has_enough = False
        self.num_reasoning_tokens = self._num_undecided = 0

    def read(self, delta: CompletionOutput) -> list[ParserEvent]:
        """The events of ``delta``, and of the output's end where that is it."""
        if self._parser is None:
            return [ContentDelta(delta.text)] if delta.text else []
        if self.has_enough:
            return []
        events = self._read_by_token(delta) if self._parser.tells_reasoning else self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events = events + self._parser.finish()
        for place, event in enumerate(events):
            if isinstance(event, ToolCallStart):
                if self._has_calls and not self._parallel:
                    self.has_enough = True
                    return events[:place]
                self._has_calls = True
        return events

    def finish_reason(self, delta: CompletionOutput) -> str | None:
        """``tool_calls`` where an output that ended by itself holds calls."""
        return "tool_calls" if delta.finish_reason == "stop" and self._has_calls else delta.finish_reason

    def _read_by_token(self, delta: CompletionOutput) -> list[ParserEvent]:
        """Parse and count by token, so that the count does not depend on how many tokens come at once."""
        assert self._parser is not None
        if len(delta.token_ids) == 1:
            events = self._parser.feed(delta.text)
            self._count()
            return events
        events, place = list[ParserEvent](), 0
        for end in delta.text_ends:
            events += self._parser.feed(delta.text[place : end - delta.start])
            place = end - delta.start
            self._count()
        return events + self._parser.feed(delta.text[place:])

    def _count(self) -> None:
        """Count a token as reasoning if the answer has not begun behind it; an opening tag, if reasoning follows."""
        assert self._parser is not None
        is_reasoning = self._parser.is_reasoning
        if is_reasoning is None:
            self._num_undecided += 1
        elif is_reasoning:
            self.num_reasoning_tokens += 1 + self._num_undecided
            self._num_undecided = 0


def _how_to_call(
    request: TurnRequest, parser: type[ToolParser] | None, args: ParserArgs
) -> tuple[type[ToolParser] | None, StructuredOutput | None]:
    """How calls are read, and what the output is held to where one is wanted in any case.

    Where the model's own syntax cannot be enforced, the output is the call's JSON alone.
    """
    choice, functions = request.tool_choice, args.functions
    if choice.mode == "function" and choice.name not in functions:
        known = ", ".join(functions) or "none"
        raise ApiError(
            400, f"tool_choice names the function {choice.name!r:.80}; tools has {known}", param="tool_choice"
        )
    if not choice.is_forced:
        if parser is None:
            raise ApiError(
                400,
                "tools: no parser of tool calls is known for this model; start the server with --tool-parser NAME, "
                "or force a call with tool_choice",
                param="tools",
            )
        return parser, None
    if parser is not None:
        structure = parser(args).constraint(choice.name, parallel=choice.may_be_several)
        if structure is not None:
            return parser, structure
    name = choice.name or (next(iter(functions)) if len(functions) == 1 else None)
    if name is not None:
        return OneCall.of(name), StructuredOutput.json_schema(parameters(functions[name]))
    return AnyCall, StructuredOutput.json_schema(call_schema(functions))
