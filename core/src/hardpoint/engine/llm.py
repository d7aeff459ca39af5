"""``LLM``: prompts in, texts out, in one process. The names are those that users of vLLM know."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from hardpoint.bench.stages import mark
from hardpoint.checkpoint.source import resolve_tokenizer
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.engine.conversation import Conversation
from hardpoint.engine.core import EngineCore, EngineStats, RequestOptions
from hardpoint.engine.generation_config import GenerationConfig
from hardpoint.engine.outputs import RequestOutput
from hardpoint.engine.request import Request
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.selection import SelectionTable
from hardpoint.tokenizer import ChatTemplate, Tokenizer
from hardpoint_plugin_api import HardpointError, RequestError

T = TypeVar("T")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``, and perhaps a ``cache_salt``."""


class LLM:
    """An engine with a tokenizer. Use it as a context manager, or ``close`` it, to free its memory early.

    Calls may overlap: streams left open, and calls from several threads, share the engine's steps.

    ``model`` is a folder, a hub id or ``"demo"``; every other keyword is a field of EngineConfig (``platform="cpu"``,
    ``attention_backend=...``, ``max_model_len=...``).
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._start(EngineConfig.create(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An LLM for a config that was already read."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        blueprint = draw(config)
        mark("selection")
        self.config = blueprint.config
        self._tokenizer_folder = resolve_tokenizer(config.tokenizer) if config.tokenizer else blueprint.folder
        self.tokenizer = Tokenizer.load(self._tokenizer_folder)
        self._generation = GenerationConfig.read(blueprint.folder)
        self._chat_template: ChatTemplate | None = None
        mark("tokenizer")
        self.core = EngineCore.start(blueprint)
        self._lock, self._closed = threading.RLock(), False
        self._runs: dict[Request, tuple[_Run, Conversation]] = {}

    @property
    def table(self) -> SelectionTable:
        """Which implementation serves what, and why."""
        return self.core.table

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds so far."""
        return self.core.stats

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for; greedy where it asks for nothing."""
        return self._generation.sampling_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; results are in the order of the prompts. ``use_tqdm`` shows a progress bar.

        Prompts of a lower ``priority`` (one number each) run first. What is not finished ``timeout`` seconds from now
        ends as it is, with the reason "abort".

        Raises RequestError for a bad prompt, or CapacityError for one that can never fit, before anything runs.
        """
        many = _as_list(prompts)
        params = _one_each("sampling_params", sampling_params or self.default_sampling_params(), SamplingParams, many)
        ranks = _one_each("priority", 0 if priority is None else priority, int, many)
        with self._opened() as run:
            for number, (prompt, each, rank) in enumerate(zip(many, params, ranks, strict=True)):
                try:
                    self._open(run, prompt, each, priority=rank, timeout=timeout)
                except RequestError as error:
                    raise RequestError(f"prompt {number}: {error}" if len(many) > 1 else str(error)) from error
            with _progress(len(many), show=use_tqdm and len(many) > 1) as advance:
                for conversation in self._grown(run):
                    if conversation.output.finished:
                        advance()
            return [conversation.output for conversation in run.conversations]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, rendered by the checkpoint's chat template."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self.render_chat(
                each,  # type: ignore[arg-type]  # told apart above
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for each in conversations
        ]
        ids = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        both = [{"prompt": p, "prompt_token_ids": i} for p, i in zip(prompts, ids, strict=True)]
        return self.generate(both, sampling_params, use_tqdm)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation as the model expects it; raises RequestError for messages the template refuses."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate.load(self._tokenizer_folder, self.tokenizer.special_tokens)
        return self._chat_template.render(messages, **options)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the growing output of one prompt, once per step that adds to it."""
        with self._opened() as run:
            self._open(run, prompt, sampling_params or self.default_sampling_params())
            for conversation in self._grown(run):
                yield conversation.output

    def close(self) -> None:
        """Free weights and caches; the LLM takes no more prompts. Closing twice is once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _opened(self) -> Iterator[_Run]:
        """A call's conversations; whatever way the call ends, none of them goes on after it."""
        run = _Run()
        try:
            yield run
        finally:
            with self._lock:
                for conversation in run.conversations:
                    conversation.abort()
                    for request in conversation.requests:
                        self._runs.pop(request, None)

    def _open(self, run: _Run, prompt: Prompt, params: SamplingParams, **options: Unpack[RequestOptions]) -> None:
        text, ids, salt = self._tokens(prompt)
        if salt is not None:
            options["cache_salt"] = salt
        with self._lock:
            if self._closed:
                raise RequestError("this LLM is closed; make a new one")
            conversation = Conversation(self.core, self.tokenizer, text, ids, params, self._eos_token_ids, **options)
            run.conversations.append(conversation)
            run.num_open += 1
            self._runs |= dict.fromkeys(conversation.requests, (run, conversation))

    def _grown(self, run: _Run) -> Iterator[Conversation]:
        """Step until all of ``run`` are finished; yields a conversation each time its output grew.

        A step serves every call that is under way, in whatever thread, so each may find its own work done by another.
        """
        while True:
            with self._lock:
                if not run.fresh and run.num_open and run.error is None:
                    self._step()
                fresh, run.fresh = run.fresh, {}
            yield from fresh
            if run.error is not None:
                raise HardpointError(f"a step of the engine failed in another call: {run.error!r}") from run.error
            if not run.num_open and not run.fresh:
                return

    def _step(self) -> None:
        try:
            advanced = self.core.step()
        except BaseException as error:
            for other, _ in self._runs.values():
                other.error = error
            self._runs.clear()
            raise
        for request in advanced:
            if request in self._runs:
                run, conversation = self._runs[request]
                if conversation.advance(request):
                    run.fresh[conversation] = None
                    run.num_open -= conversation.output.finished

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        own = self.tokenizer.eos_token_id
        return self._generation.eos_token_ids | (frozenset() if own is None else {own})

    def _tokens(self, prompt: object) -> tuple[str | None, list[int], str | None]:
        """Text, token ids and salt of a prompt in any of its forms; raises RequestError for anything else."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt), None
        if isinstance(prompt, Mapping):
            text, ids, salt = (prompt.get(key) for key in _PROMPT_KEYS)
            if unknown := set(prompt) - set(_PROMPT_KEYS):
                raise RequestError(f"a prompt has no {sorted(map(str, unknown))}; known: {', '.join(_PROMPT_KEYS)}")
            if not (text is None or isinstance(text, str)) or not (salt is None or isinstance(salt, str)):
                raise RequestError(f"'prompt' and 'cache_salt' are texts, got {text!r} and {salt!r}")
            if ids is None and text is None:
                raise RequestError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            return text, self.tokenizer.encode(str(text)) if ids is None else _token_ids(ids), salt
        return None, _token_ids(prompt), None


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = "a prompt is a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"


@dataclass
class _Run:
    """One call's conversations, how many are not finished, and which have grown since it last looked."""

    conversations: list[Conversation] = field(default_factory=list)
    num_open: int = 0
    fresh: dict[Conversation, None] = field(default_factory=dict)
    error: BaseException | None = None


def _token_ids(ids: object) -> list[int]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not all(_is_token_id(i) for i in ids):
        raise RequestError(f"{_FORMS}, got {ids!r:.80}")
    return [int(i) for i in ids]


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_list(prompts: object) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"{_FORMS}, or a list of such, got {prompts!r:.80}")
    return [prompts] if prompts and _is_token_id(prompts[0]) else list(prompts)


def _one_each(name: str, given: object, kind: type[T], prompts: Sequence[object]) -> list[T]:
    """One ``kind`` for each prompt, from one for all or a sequence; raises RequestError, naming the parameter."""
    if isinstance(given, kind):
        return [given] * len(prompts)
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise RequestError(f"{name} must be one {kind.__name__}, or a list of one per prompt, got {given!r:.80}")
    if len(given) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts, but {len(given)} {name}; give one, or one per prompt")
    return list(given)


class _progress:  # noqa: N801  # used as a function
    """A progress bar over finished requests, on stderr, where it is wanted."""

    def __init__(self, total: int, show: bool) -> None:
        self._total, self._show = total, show

    def __enter__(self) -> Any:
        if not self._show:
            return lambda: None
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        task = self._bar.add_task("requests", total=self._total)
        self._bar.start()
        return lambda: self._bar.advance(task)

    def __exit__(self, *error: object) -> None:
        if self._show:
            self._bar.stop()
