"""``AsyncEngine``: many streams at once for asyncio, with the core in a process of its own unless told otherwise."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack
from weakref import WeakValueDictionary

from hardpoint.config import EngineArgs, EngineConfig
from hardpoint.engine.client import EngineStats, RequestOptions, ServedCore, StartCore
from hardpoint.engine.control import (
    TAGS,
    LoadAdapter,
    MemoryReport,
    R,
    ReadMetrics,
    ReportMemory,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    Verb,
    WakeUp,
    check_tags,
    sleep_tags,
)
from hardpoint.engine.frontend.frontend import Frontend, connect, start_core
from hardpoint.engine.frontend.prompts import Prompt, TokensPrompt
from hardpoint.engine.frontend.streams import Mailbox, News, RequestStream
from hardpoint.engine.lora import Adapter, LoRARequest
from hardpoint.engine.outputs import RequestOutput
from hardpoint.engine.remote.core_process import CLOSED
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.engine.requests import RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.parsers import Parsers
from hardpoint.selection import SelectionTable
from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import EngineDeadError, RequestError

if TYPE_CHECKING:
    from hardpoint.metrics import MetricsSnapshot

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_CLOSED = "this AsyncEngine is closed; make a new one"
_NUM_READERS = 4
"""Threads that tokenize prompts and render chats."""
_LONG_PROMPT = 2**18
"""Texts of more characters are tokenized one at a time, in a thread of their own: they take seconds and much memory."""
MAX_CHARACTERS = 2**21
"""Characters of a text that is tokenized whole, however few tokens the model takes: half a kilobyte for each token."""
_ABORT_SECONDS = 5.0
"""Seconds that closing waits for the last outputs of requests that it aborts."""


Connect = Callable[[EngineConfig], tuple[Frontend, ServedCore]]
"""Finds the core of an engine, and reads the text side of its checkpoint. Raises what either raises."""


def connect_own(config: EngineConfig, start: StartCore = start_core) -> tuple[Frontend, ServedCore]:
    """Start a core for one engine alone."""
    return connect(config, own_process=has_own_process(config), start=start)


def has_own_process(config: EngineConfig) -> bool:
    """Whether the core of an engine for asyncio runs in a process of its own."""
    return config.wants_core_process(default=config.executor_kind != "torchrun")


class AsyncEngine:
    """An engine with a tokenizer for asyncio programs. Use it as an async context manager, or ``await close()``.

    Building one waits until the model is loaded: build it before the event loop runs, or with
    ``await asyncio.to_thread(AsyncEngine, ...)``. Its streams may be in several event loops.

    ``model`` and the keywords are those of LLM. Tokenizing, detokenizing and talking to the core happen in threads of
    its own, so that nothing here keeps the event loop waiting.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._start(EngineConfig.create(model=model, **settings), connect_own)

    @classmethod
    def from_config(cls, config: EngineConfig, connect: Connect | None = None) -> Self:
        """An engine for a config that was already read; ``connect`` finds its core. None: it starts its own."""
        engine = cls.__new__(cls)
        engine._start(config, connect or connect_own)
        return engine

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """An engine for settings that were written as vLLM's AsyncEngineArgs."""
        return cls.from_config(args.create_engine_config())

    def _start(self, config: EngineConfig, connect: Connect) -> None:
        self._frontend, self.client = connect(config)
        self._streams: dict[str, RequestStream] = {}
        self._by_request: dict[RequestProgress, RequestStream] = {}
        self._mailboxes: WeakValueDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakValueDictionary()
        self._advancing = threading.Lock()  # while conversations begin or advance; no event loop takes it
        self._opening = threading.Condition()  # of _streams, _closing and _drain_until; held for moments only
        self._closing, self._drain_until = False, float("inf")
        self._dead: EngineDeadError | None = None
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="hardpoint-prompts")
        self._long_reader = ThreadPoolExecutor(1, thread_name_prefix="hardpoint-long-prompts")
        self._outputs = threading.Thread(target=self._serve, name="hardpoint-outputs", daemon=True)
        self._outputs.start()

    @property
    def config(self) -> EngineConfig:
        """The user's config with the changes that plugins wished for."""
        return self.client.facts.config

    @property
    def table(self) -> SelectionTable:
        """The selection table: the implementation chosen for each part of the model, and the reasons."""
        return self.client.facts.table

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together, in tokens."""
        return self.client.facts.max_model_len

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that are loaded, which ``submit`` takes by name."""
        return self.client.adapters

    @property
    def is_sleeping(self) -> bool:
        """True between ``sleep`` and the ``wake_up`` of all that sleeps."""
        return self.client.is_sleeping

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds, requests and pages, as of the last step."""
        return self.client.stats

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._frontend.tokenizer

    @property
    def is_running(self) -> bool:
        """True while requests are taken: not closed, and the core is alive."""
        try:
            self.check_health()
        except (EngineDeadError, RequestError):
            return False
        return True

    @property
    def recovery(self) -> RecoveryState:
        """The state of recovery from failures of the core, and whether it is being built again at this moment."""
        return self.client.recovery

    def check_health(self) -> None:
        """Raise EngineDeadError if the core is gone, RequestError if this engine was closed.

        A core that is being built again is not gone; see ``recovery``.
        """
        if self._closing:
            raise RequestError(_CLOSED)
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        self.client.check()

    def default_sampling_params(self) -> SamplingParams:
        """The parameters of the checkpoint's generation_config.json; greedy where it has none."""
        return self._frontend.default_sampling_params()

    def choose_parsers(self) -> Parsers:
        """Choose the parsers of the model's output: as the config says, else by its chat template."""
        return self._frontend.choose_parsers(self.client.facts.config)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation as the model expects it; raises RequestError for messages the template refuses."""
        return self._frontend.render_chat(messages, **options)

    def tokenizer_config(self) -> dict[str, Any]:
        """The checkpoint's tokenizer_config.json, with the chat template in use. See Frontend.tokenizer_config."""
        return self._frontend.tokenizer_config()

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """A conversation as a prompt; ``options`` are those of ``render_chat``."""
        return self._frontend.chat_prompt(messages, **options)

    async def read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        is_limited: bool = True,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> TokensPrompt:
        """A conversation as a prompt, made in threads; ``options`` are those of ``render_chat``.

        Templates write special tokens themselves, unless ``add_special_tokens``. Raises ContextLengthError where the
        prompt is too long for the model and ``is_limited``.
        """
        loop = asyncio.get_running_loop()
        render = functools.partial(self._frontend.render_chat, messages, **options)
        text = await loop.run_in_executor(self._readers, render)
        ids = await self.encode(text, is_limited=is_limited, add_special_tokens=add_special_tokens)
        return {"prompt": text, "prompt_token_ids": ids}

    async def encode(self, text: str, *, is_limited: bool = False, add_special_tokens: bool = True) -> list[int]:
        """The tokens of ``text``, found in a thread. Raises ContextLengthError as ``read_chat`` does, and RequestError
        for a text without that limit of more than MAX_CHARACTERS."""
        most = self.max_model_len if is_limited else None
        if most is None:
            _check_characters(text)
        encode = functools.partial(self._frontend.encode, text, most, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._reader_of(text), encode)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        lora_request: LoRARequest | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt, the last time with ``finished``.

        Each output is the caller's own, and holds everything so far unless ``output_kind`` says otherwise; a slow
        caller gets fewer, longer steps. Leaving the
        iteration, or cancelling the task that waits in it, ends the request. A request of a lower ``priority`` runs
        first; ``timeout`` seconds from now it ends as it is, with the reason "abort". It runs with the adapter of
        ``lora_request``, which is loaded where it is not yet, on the replica ``data_parallel_rank``; None: on any.

        Raises RequestError for what is wrong with the request, what LoadAdapter does for an adapter, EngineError where
        the engine failed to serve it, and EngineDeadError once the core is gone.
        """
        options = RequestOptions(priority=priority, timeout=timeout, data_parallel_rank=data_parallel_rank)
        return self._generate(prompt, sampling_params, request_id, lora_request, **options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, rendered by the checkpoint's chat template; otherwise as ``generate``."""
        prompt = functools.partial(
            self.chat_prompt,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return self._generate(prompt, sampling_params, request_id, lora_request, priority=priority, timeout=timeout)

    async def submit(
        self,
        prompt: Prompt | Callable[[], Prompt],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Queue a prompt and return the stream of its outputs.

        ``prompt`` may be a function that makes it: a thread calls it, so that it may take its time. ``submit`` is the
        first half of ``generate``, for callers that must know whether a request is valid before they begin an answer.
        Use the stream as an async context manager, or close it: the request runs whether anybody reads or not.
        """
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, got {params!r:.80}")
        seed = params.seed
        if seed is None:  # drawn here: in the order of calls, not in that of tokenizing
            seed = self.client.draw_seed()
        loop = asyncio.get_running_loop()
        if (mailbox := self._mailboxes.get(loop)) is None:
            mailbox = self._mailboxes[loop] = Mailbox(loop)
        stream = RequestStream(uuid.uuid4().hex if request_id is None else request_id, mailbox, self._forget)
        with self._opening:
            if self._closing:
                raise RequestError(_CLOSED)
            if stream.request_id in self._streams:
                raise RequestError(f"request_id {request_id!r} is that of an open request; give another one")
            self._streams[stream.request_id] = stream
        try:
            await loop.run_in_executor(self._reader_of(prompt), self._open, stream, prompt, params, seed, options)
        except BaseException:
            stream.close()
            raise
        return stream

    async def abort(self, request_id: str) -> bool:
        """End a request as it is, with the reason "abort"; False where no such request is open."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.abort()
        return stream is not None

    async def metrics(self) -> MetricsSnapshot:
        """The metrics of the engine and its plugins."""
        return await self.control(ReadMetrics())

    async def memory_report(self) -> MemoryReport:
        """The device's memory, by holder."""
        return await self.control(ReportMemory())

    async def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Give memory back until ``wake_up``; see LLM.sleep. Raises EngineError while requests are under way."""
        await self.control(Sleep(sleep_tags(level, tags)))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again: all of it, or ``tags``; see LLM.wake_up."""
        await self.control(WakeUp(TAGS if tags is None else check_tags(tags)))

    async def update_weights(self, source: str | Path) -> None:
        """Replace the weights by those of a folder or hub id; see LLM.update_weights."""
        await self.control(UpdateWeights(str(source)))

    async def start_profile(self, folder: str | Path, layers: bool = False) -> None:
        """Record what the engine does until ``stop_profile``; see LLM.start_profile."""
        await self.control(StartProfile(str(folder), layers))

    async def stop_profile(self) -> None:
        """Write the profile into its folder."""
        await self.control(StopProfile())

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self.control(ResetPrefixCache())

    async def control(self, verb: Verb[R]) -> R:
        """Have the core do ``verb`` between two steps. Raises what check_health does, and what the core does."""
        self.check_health()
        return await asyncio.to_thread(lambda: self.client.control(verb.prepared()))

    async def close(self, drain: float = 0.0) -> None:
        """Take no more requests, let the open ones go on for up to ``drain`` seconds, end the rest, free everything.

        Requests that are ended yield what they have, with the reason "abort". Closing twice is once; a second call may
        shorten the time that the first one gave.
        """
        await asyncio.to_thread(self._close, drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _generate(
        self,
        prompt: Prompt | Callable[[], Prompt],
        params: SamplingParams | None,
        request_id: str | None,
        lora_request: LoRARequest | None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        if lora_request is not None:
            if not lora_request.is_among(self.adapters):
                await self.control(LoadAdapter(lora_request.lora_name, lora_request.lora_path))
            options["adapter"] = lora_request.lora_name
        async with await self.submit(prompt, params, request_id, **options) as stream:
            async for output in stream:
                yield output

    def _reader_of(self, prompt: Prompt | Callable[[], Prompt]) -> ThreadPoolExecutor:
        """The threads that read ``prompt``."""
        text = _text_of(prompt)
        return self._long_reader if isinstance(text, str) and len(text) > _LONG_PROMPT else self._readers

    def _open(
        self,
        stream: RequestStream,
        prompt: Prompt | Callable[[], Prompt],
        params: SamplingParams,
        seed: int,
        options: RequestOptions,
    ) -> None:
        """Tokenize and queue a prompt, unless nobody wants it any more."""
        most = self.max_model_len if params.truncate_prompt_tokens is None else None
        given = prompt() if callable(prompt) else prompt
        if most is None:
            _check_characters(_text_of(given))
        tokenized = self._frontend.read(given, most)
        self._frontend.check(self.client, params)
        with self._advancing:
            if self._dead is not None:
                raise EngineDeadError(str(self._dead))
            if not stream.is_closed:
                conversation = self._frontend.converse(
                    self.client, tokenized, params, stream.request_id, seed, **options
                )
                self._by_request |= dict.fromkeys(conversation.requests, stream)
                stream.begin(conversation)

    def _serve(self) -> None:
        """Turn what the core reports into outputs, until it is gone."""
        try:
            while True:
                self._advance(self.client.step())
        except EngineDeadError as error:
            dead = error
        except Exception as error:
            logger.exception("outputs can no longer be made")
            dead = EngineDeadError(f"outputs can no longer be made: {type(error).__name__}: {error}")
        if not self._closing and str(dead) != CLOSED:  # a program may end without closing
            logger.error("the engine is gone: %s", dead)
        with self._advancing:
            self._dead = dead
        for stream in list(self._streams.values()):
            stream.mailbox.put({stream: RequestError(_CLOSED) if self._closing else EngineDeadError(str(dead))})
            self._forget(stream)

    def _advance(self, advanced: Sequence[RequestProgress]) -> None:
        grown: dict[RequestStream, None] = {}
        with self._advancing:
            for request in advanced:
                stream = self._by_request.get(request)
                if request.finish_reason is not None:
                    self._by_request.pop(request, None)
                if stream is not None and stream.advance(request):
                    grown[stream] = None
        news: dict[Mailbox, dict[RequestStream, News]] = {}
        for stream in grown:
            news.setdefault(stream.mailbox, {})[stream] = stream.newest()
        for mailbox, of_loop in news.items():
            mailbox.put(of_loop)

    def _forget(self, stream: RequestStream) -> None:
        """Nothing more will come of ``stream``; its name is free."""
        with self._opening:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
                self._opening.notify_all()

    def _close(self, drain: float) -> None:
        with self._opening:
            self._closing, self._drain_until = True, min(self._drain_until, time.monotonic() + drain)
            self._opening.notify_all()
            while self._streams and (left := self._drain_until - time.monotonic()) > 0:
                self._opening.wait(left)
            remaining = list(self._streams.values())
        for stream in remaining:
            stream.abort()
        with self._opening:
            self._opening.wait_for(lambda: not self._streams, _ABORT_SECONDS)
        self._readers.shutdown(wait=False)
        self._long_reader.shutdown(wait=False)
        self.client.close()
        self._outputs.join()


def _text_of(prompt: object) -> object:
    """The text of ``prompt`` that is to be tokenized; something else where there is none."""
    if not isinstance(prompt, Mapping):
        return prompt
    return prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None


def _check_characters(text: object) -> None:
    """Raise RequestError for a text that is too long to be tokenized whole."""
    if isinstance(text, str) and len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"the text has {len(text)} characters, and {MAX_CHARACTERS} at most are tokenized; send a part of it"
        )
