"""``/v1/completions``."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any, cast

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from hardpoint.engine.frontend.prompts import Prompt
from hardpoint.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hardpoint.server.errors import ApiError
from hardpoint.server.fields import (
    IgnoredFields,
    NumLogprobs,
    SamplingFields,
    StreamOptions,
    TreatmentFields,
    VllmFields,
)
from hardpoint.server.generation import Cursor, Generation, GenerationRequest
from hardpoint.server.openai.format import ResponseFormat
from hardpoint.server.openai.logprobs import TextOffsets, completion_logprobs, prompt_logprobs, tokenizer_of
from hardpoint.server.openai.routed_experts import routed_experts
from hardpoint.server.openai.usage import usage_body, usage_wishes
from hardpoint.server.requests import JsonRoute, check_best_of, check_stream_options, data_parallel_rank, request_id
from hardpoint.server.service import Service, ServiceOf
from hardpoint.server.watched import EventStream, JsonAnswer, data_event

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

_DEFAULT_MAX_TOKENS = 16
_HOLE = "\0choices"
"""Stands in the text around a chunk where its choices go; no name of a model has it."""


def _of_one_form(prompt: object) -> object:
    """Refuse a list of items of several kinds: pydantic would describe each item for each form."""
    items = prompt if isinstance(prompt, list) else []
    kinds = {type(item) for item in items}
    inner = {type(token) for item in items if isinstance(item, list) for token in item}
    if len(kinds) > 1 or not kinds <= {str, int, list} or not inner <= {int}:
        forms = "must be a text, a list of texts, a list of token ids or a list of lists of them"
        raise PydanticCustomError("prompt_form", forms)
    return prompt


class CompletionRequest(SamplingFields, TreatmentFields, VllmFields, IgnoredFields):
    """Texts or token ids to continue. ``docs/serving.md`` has a line on every field."""

    model: str | None = None
    prompt: Annotated[str | list[int] | list[str] | list[list[int]], BeforeValidator(_of_one_form)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [cast("str | list[int]", self.prompt)]
        return self.prompt

    @property
    def draws_nothing(self) -> bool:
        """True where the prompt alone is to be scored: the engine draws one token, which is dropped."""
        return self.max_tokens == 0

    def to_generation(self, service: Service) -> GenerationRequest:
        """The request to the engine. Raises ApiError and RequestError."""
        check_stream_options(self.stream_options, self.stream)
        check_best_of(self.best_of, self.n)
        if self.suffix:
            raise ApiError(400, "suffix is not supported: the model continues text, and fills no gaps", param="suffix")
        if self.draws_nothing and not self.echo:
            raise ApiError(
                400, "max_tokens 0 is allowed with echo only; ask for at least one token", param="max_tokens"
            )
        most = _DEFAULT_MAX_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)
        own: dict[str, Any] = {"max_tokens": most, "return_routed_experts": bool(self.return_routed_experts)}
        if self.logprobs is not None:
            own["logprobs"] = self.logprobs
            if self.echo:
                own["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        params = self.sampling_params(service.host.default_params(), **own)
        structure = self.structure(None if self.response_format is None else self.response_format.structure())
        if structure is not None:
            params = replace(params, structured=structure)
        return GenerationRequest(self.prompts, params, self.priority or 0, self.cache_salt)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, service: ServiceOf) -> Response:
    """Continue texts."""
    model = service.check_model(body.model)
    own_id, rank = body.request_id or request_id(request), data_parallel_rank(request)
    answer = _Answer(body, model, service, own_id)
    asked = body.to_generation(service)
    asked = replace(asked, adapter=service.adapter(model), request_id=own_id, data_parallel_rank=rank)
    if body.add_special_tokens is False:
        asked = replace(asked, prompts=[await _without_special_tokens(each, asked, service) for each in asked.prompts])
    generation = await Generation.admit(asked, service)
    if body.stream:
        return EventStream(request, answer.events(generation), data_event)
    return JsonAnswer(lambda: answer.whole(generation))


async def _without_special_tokens(prompt: Prompt, asked: GenerationRequest, service: Service) -> Prompt:
    if not isinstance(prompt, str):
        return prompt
    is_limited = asked.params.truncate_prompt_tokens is None
    ids = await service.host.engine.encode(prompt, is_limited=is_limited, add_special_tokens=False)
    return {"prompt": prompt, "prompt_token_ids": ids}


class _Answer:
    """Writes one request's answer."""

    def __init__(self, body: CompletionRequest, model: str, service: Service, own_id: str) -> None:
        self._body, self._service = body, service
        self._offsets: dict[int, TextOffsets] = {}
        self._head = {
            "id": f"cmpl-{own_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        async with generation:
            outputs = await generation.finished()
            choices: list[dict[str, Any]] = []
            for output in outputs:
                for completion in output.outputs:
                    choices.append(self._choice(len(choices), output, completion, is_first=True))
            return {**self._head, "choices": choices, "usage": self._usage(generation), "system_fingerprint": None}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        body = self._body
        wants_usage, counts = usage_wishes(body.stream_options)
        head = self._head | ({"usage": None} if wants_usage else {})
        before, after = _around(head)
        is_plain = body.logprobs is None and not (body.echo or body.return_token_ids)
        wants_scores = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
        cursors: defaultdict[int, Cursor] = defaultdict(Cursor)
        begun, held = set[int](), dict[int, RequestOutput]()
        async with generation, aclosing(generation.grown()) as grown:
            async for number, output in grown:
                if number in held:
                    held[number].extend(output)
                    output = held.pop(number)
                if wants_scores and output.prompt_logprobs is None and not output.finished:
                    held[number] = output  # another choice was faster than the first, which alone scores the prompt
                    continue
                chunks = []
                for completion in output.outputs:
                    index = number * generation.num_choices + completion.index
                    delta = cursors[index].take(completion)
                    if delta is None:
                        continue
                    is_first = index not in begun
                    begun.add(index)
                    is_told = is_first and body.prompt_logprobs is not None
                    if is_plain and not is_told and delta.finish_reason is None:
                        chunks.append(_chunk(index, delta.text))
                    else:
                        choice = self._choice(index, output, delta, is_first=is_first)
                        chunks.append(json.dumps(choice, separators=(",", ":")).encode())
                if counts:
                    before, after = _around(head | {"usage": self._usage(generation)})
                if chunks:
                    yield b"".join([before + chunk + after for chunk in chunks])
            if wants_usage:
                yield data_event(head | {"choices": [], "usage": self._usage(generation)})
        yield b"data: [DONE]\n\n"

    def _choice(self, index: int, output: RequestOutput, delta: CompletionOutput, *, is_first: bool) -> dict[str, Any]:
        body, echo = self._body, bool(self._body.echo) and is_first
        if body.draws_nothing:
            finish = delta.finish_reason and "length"
            delta = replace(delta, text="", token_ids=[], logprobs=delta.logprobs and [], finish_reason=finish)
        prompt = self._prompt_text(output) if body.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt + delta.text if echo else delta.text,
            "logprobs": self._logprobs(index, output, delta, prompt, echo=echo),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
            if body.return_routed_experts:
                choice["routed_experts"] = routed_experts(delta.routed_experts)
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _logprobs(
        self, index: int, output: RequestOutput, delta: CompletionOutput, prompt: str, *, echo: bool
    ) -> dict[str, Any] | None:
        """The log-probabilities of ``delta``, whose text follows ``prompt``; with ``echo`` the prompt's come first."""
        if self._body.logprobs is None:
            return None
        tokenizer, prompt_ids = tokenizer_of(self._service), output.prompt_token_ids
        by_id = bool(self._body.return_tokens_as_token_ids)
        own = self._offsets.setdefault(index, TextOffsets(tokenizer, prompt_ids))
        offsets = [len(prompt) + offset for offset in own.take(delta.token_ids, delta.text, delta.start)]
        token_ids, scored = delta.token_ids, list[PositionLogprobs | None](delta.logprobs or ())
        if echo and output.prompt_logprobs is not None:
            token_ids, scored = prompt_ids + token_ids, output.prompt_logprobs + scored
            offsets = [min(len(prompt), each) for each in TextOffsets(tokenizer).take(prompt_ids, prompt)] + offsets
        if delta.finish_reason is not None:  # tokens of a stop text are no text
            end = len(prompt) + delta.start + len(delta.text)
            offsets = [min(end, each) for each in offsets]
        return completion_logprobs(token_ids, scored, self._body.logprobs, offsets, tokenizer, by_id=by_id)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return tokenizer_of(self._service).decode(output.prompt_token_ids, skip_special_tokens=False)

    def _usage(self, generation: Generation) -> dict[str, Any]:
        usage = generation.usage
        return usage_body(replace(usage, completion_tokens=0) if self._body.draws_nothing else usage)


def _around(head: dict[str, Any]) -> list[bytes]:
    """The bytes before a chunk's choice, and after it."""
    return data_event(head | {"choices": [_HOLE]}).split(quoted(_HOLE).encode())


def _chunk(index: int, text: str) -> bytes:
    return f'{{"index":{index},"text":{quoted(text)},"logprobs":null,"finish_reason":null}}'.encode()
