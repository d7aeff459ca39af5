"""Requests to the engine and their outputs, for every protocol: the one place where handlers meet AsyncEngine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import astuple, dataclass, replace
from types import TracebackType
from typing import Self

from hardpoint.engine.client import RequestOptions
from hardpoint.engine.frontend.prompts import Prompt
from hardpoint.engine.frontend.streams import RequestStream
from hardpoint.engine.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.server.errors import ApiError
from hardpoint.server.request_metrics import EndedRequest
from hardpoint.server.service import Service
from hardpoint_plugin_api import RequestError

logger = logging.getLogger(__name__)

MAX_COMPLETIONS = 1024
"""Completions of one HTTP request, of all its prompts together."""


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts, each with ``params.n`` completions, and how they are treated beside other requests."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: str = ""
    request_id: str = ""
    data_parallel_rank: int | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) * self.params.n > MAX_COMPLETIONS:
            raise ApiError(
                400, f"n: {len(self.prompts)} prompts with {self.params.n} completions are over {MAX_COMPLETIONS}"
            )


@dataclass(frozen=True)
class Usage:
    """Tokens that one HTTP request took, of all its prompts and completions.

    ``reasoning_tokens`` of the completions' were drawn before the answer began, where the two are told apart.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """The usage of two parts together."""
        return Usage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Generation:
    """An admitted request. An async context manager: leaving it ends what still runs.

    ``outputs`` has the newest part of each prompt's. Completion ``index`` of prompt ``p`` is choice ``p * n + index``.
    """

    def __init__(self, request: GenerationRequest, service: Service) -> None:
        self.outputs: list[RequestOutput | None] = [None] * len(request.prompts)
        self._host, self._metrics, self._began = service.host, service.metrics.requests, time.perf_counter()
        self._traces = service.traces
        self._params, self._model = request.params, request.adapter or service.model_names[0]
        self._count_inter_token = self._metrics.inter_token(self._model)
        self.num_choices = request.params.n
        self._streams: list[RequestStream] = []
        self._exits = AsyncExitStack()
        self._last: float | None = None
        self._num_tokens, self._is_cut = 0, False
        self._by_choice: Counter[int] = Counter()
        self._reasons: list[str] = []
        self._started: float | None = None
        self._first: float | None = None
        self._request_id, self._logs = request.request_id, service.settings.log_requests

    @classmethod
    async def admit(cls, request: GenerationRequest, service: Service) -> Self:
        """Queue ``request``. Raises ApiError where no engine takes it, RequestError for what is wrong with it."""
        engine, lowest = service.host.engine, service.settings.min_priority
        if request.priority < lowest:
            raise ApiError(
                400,
                f"priority {request.priority} is below {lowest}, the lowest that this server takes (--min-priority)",
                param="priority",
            )
        generation = cls(request, service)
        params = replace(request.params, output_kind=RequestOutputKind.DELTA)
        try:
            for prompt in request.prompts:
                stream = await engine.submit(prompt, params, **_options(request))
                generation._streams.append(await generation._exits.enter_async_context(stream))
        except RequestError as error:
            await generation._exits.aclose()
            if service.host.state == "stopping":  # told to stop since it was asked
                raise ApiError(503, "the server is shutting down", code="shutting_down") from error
            raise
        except BaseException:
            await generation._exits.aclose()
            raise
        return generation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()
        usage = self.usage
        seconds = time.perf_counter() - self._began
        summary = self._summary(seconds, usage)
        self._metrics.ended(self._model, summary)
        if self._traces is not None:
            self._traces.ended(self._model, self._request_id, summary)
        if self._logs:
            logger.info(
                "request %s: %d prompt tokens, %d of them cached, %d completion tokens; %s, %.3f s in all; %s",
                self._request_id,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                "no token" if self._first is None else f"first token after {self._first:.3f} s",
                seconds,
                "cut off" if kind is not None or self._is_cut or None in self.outputs else "finished",
            )

    def _summary(self, seconds: float, usage: Usage) -> EndedRequest:
        cut = ["abort"] * (self.num_choices * len(self.outputs) - len(self._reasons))
        return EndedRequest(
            seconds,
            usage.prompt_tokens,
            usage.completion_tokens,
            max(self._by_choice.values(), default=0),
            self.num_choices,
            self._params.max_tokens,
            self._started,
            self._first,
            self._reasons + cut,
        )

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        outputs = [output for output in self.outputs if output is not None]
        return Usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
            self._num_tokens,
        )

    def stop(self, choice: int) -> None:
        """End a choice, of which there is some output already, as one that has come to its own end."""
        number, index = divmod(choice, self.num_choices)
        self._streams[number].stop(index)

    async def grown(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield each prompt's number and what is new of its output, until all are finished.

        Raises EngineError where the engine failed, ApiError where the server's end cut the request short.
        """
        if len(self._streams) == 1:  # the usual case, without another task between engine and client
            async for output in self._streams[0]:
                self._took(0, output)
                yield 0, output
            return
        async with aclosing(_merged(self._streams)) as merged:
            async for number, output in merged:
                self._took(number, output)
                yield number, output

    async def finished(self) -> list[RequestOutput]:
        """The complete outputs, one for each prompt. Raises what ``grown`` does."""
        whole: dict[int, RequestOutput] = {}
        async for number, output in self.grown():
            if number in whole:
                whole[number].extend(output)
            else:
                whole[number] = output
        return [whole[number] for number in sorted(whole)]

    def _took(self, number: int, output: RequestOutput) -> None:
        self.outputs[number] = output
        now, num_new = time.perf_counter(), sum(len(completion.token_ids) for completion in output.outputs)
        if self._last is None:
            self._first = now - self._began
            self._metrics.first_token(self._model, self._first)
        elif len(self._streams) == 1 and self.num_choices == 1 and num_new:
            self._count_inter_token((now - self._last) / num_new, num_new)
        self._last, self._num_tokens = now, self._num_tokens + num_new
        self._started = output.metrics.started
        for each in output.outputs:
            self._by_choice[number * self.num_choices + each.index] += len(each.token_ids)
            if each.finish_reason is not None:
                self._reasons.append(each.finish_reason)
                self._is_cut |= each.finish_reason == "abort"
        if output.finished and self._is_cut and self._host.state == "stopping":
            raise ApiError(503, "the server shut down before the answer was complete", code="shutting_down")


def _options(request: GenerationRequest) -> RequestOptions:
    return RequestOptions(
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        adapter=request.adapter,
        data_parallel_rank=request.data_parallel_rank,
    )


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several streams, as they come."""
    arrived: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def read(number: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                arrived.put_nowait((number, output))
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        remaining = len(tasks)
        while remaining:
            news = await arrived.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                remaining -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Cursor:
    """One completion's parts as a protocol takes them: none without text, but for the last."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: CompletionOutput | None = None

    def take(self, part: CompletionOutput) -> CompletionOutput | None:
        """``part`` with what was held before it; None where it is held: its tokens' text is not certain yet."""
        if self._held is not None:
            self._held.extend(part)
            part = self._held
        if not part.text and part.finish_reason is None:
            self._held = part
            return None
        self._held = None
        return part
