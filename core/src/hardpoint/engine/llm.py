"""``LLM``: prompts in, texts out. The names are those that users of vLLM know."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreClient, EngineStats, RequestOptions
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
from hardpoint.engine.frontend.conversation import Conversation
from hardpoint.engine.frontend.frontend import Frontend, connect, serve_other_ranks
from hardpoint.engine.frontend.prompts import Prompt, prompt_list
from hardpoint.engine.lora import LoRARequest
from hardpoint.engine.outputs import RequestOutput, RequestOutputKind
from hardpoint.engine.requests import RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.selection import SelectionTable
from hardpoint.startup_times import mark
from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import EngineError, RequestError

if TYPE_CHECKING:
    import torch
    from prometheus_client import Metric

    from hardpoint.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from hardpoint.engine.core import EngineCore
    from hardpoint.metrics import MetricsSnapshot

T = TypeVar("T")


class LLM:
    """An engine with a tokenizer. Use it as a context manager, or call ``close``, to free its memory early.

    Calls may overlap: open streams, and calls from several threads, share the engine's steps.

    ``model`` is a folder, a hub id or ``"demo"``; every other keyword is a field of EngineConfig (``platform="cpu"``,
    ``attention_backend=...``, ``max_model_len=...``).
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._start(EngineConfig.create(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Build an LLM from an EngineConfig."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        own_process = config.wants_core_process(default=False)
        # A replica that shares experts takes part in the others' steps while nobody steps it.
        runs_by_itself = own_process or config.topology.shares_experts
        self._frontend, self.client = (
            connect(config, own_process=own_process) if runs_by_itself else _start_here(config)
        )
        self._lock, self._closed = threading.RLock(), False
        self._runs: dict[RequestProgress, tuple[_Run, Conversation]] = {}

    @property
    def config(self) -> EngineConfig:
        """The user's config, with the changes that plugins asked for."""
        return self.client.facts.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._frontend.tokenizer

    @property
    def core(self) -> EngineCore:
        """The engine core, if it is in this process; for measurements and tests."""
        from hardpoint.engine.core import EngineCore

        assert isinstance(self.client, EngineCore), "the core has a process of its own"
        return self.client

    @property
    def table(self) -> SelectionTable:
        """The chosen implementations, and the reasons against the others."""
        return self.client.facts.table

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds so far."""
        return self.client.stats

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's generation_config.json; greedy where it has none."""
        return self._frontend.default_sampling_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; results are in the order of the prompts. ``use_tqdm`` shows a progress bar.

        Prompts of a lower ``priority`` (one number each) run first. A request that is not finished ``timeout`` seconds
        from now ends as it is, with the reason "abort". Prompts run with the adapter of ``lora_request`` (one, or one
        or None for each prompt), which is loaded where it is not yet.

        Raises RequestError for a bad prompt, or CapacityError for one that can never fit, before anything runs; what
        LoadAdapter does for an adapter.
        """
        many = prompt_list(prompts)
        params = _one_each("sampling_params", sampling_params or self.default_sampling_params(), SamplingParams, many)
        ranks = _one_each("priority", 0 if priority is None else priority, int, many)
        adapters = [""] * len(many) if lora_request is None else self._adapters(lora_request, many)
        with self._opened() as run:
            for number, (prompt, each, rank, adapter) in enumerate(zip(many, params, ranks, adapters, strict=True)):
                try:
                    self._open(run, prompt, each, priority=rank, timeout=timeout, adapter=adapter)
                except RequestError as error:
                    raise RequestError(f"prompt {number}: {error}" if len(many) > 1 else str(error)) from error
            with _progress(len(many), show=use_tqdm and len(many) > 1) as advance:
                for conversation in self._grown(run):
                    if conversation.output.finished:
                        advance()
            return [conversation.output for conversation in run.conversations]  # of no stream, so nothing was taken

    def _adapters(self, wanted: LoRARequest | Sequence[LoRARequest | None], prompts: Sequence[object]) -> list[str]:
        """The name of each prompt's adapter, loaded; an empty one for a prompt without."""
        each: list[LoRARequest | None] = [*_one_each("lora_request", wanted, LoRARequest, prompts, none=True)]
        for request in dict.fromkeys(request for request in each if request is not None):
            if not request.is_among(self.client.adapters):
                self.control(LoadAdapter(request.lora_name, request.lora_path))
        return ["" if request is None else request.lora_name for request in each]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, rendered by the checkpoint's chat template; see ``generate``."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self._frontend.chat_prompt(
                each,  # type: ignore[arg-type]  # told apart above
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return a conversation as the text that the model expects. Raises RequestError for messages the template
        refuses.
        """
        return self._frontend.render_chat(messages, **options)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Return a conversation as a prompt; ``options`` are those of ``render_chat``."""
        return self._frontend.chat_prompt(messages, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt. Yields a RequestOutput after each step that extends the output.

        ``output_kind`` sets its content, see RequestOutputKind. With CUMULATIVE all yields are one object, updated in
        place.
        """
        params = sampling_params or self.default_sampling_params()
        (adapter,) = [""] if lora_request is None else self._adapters(lora_request, [prompt])
        with self._opened() as run:
            self._open(run, prompt, params, adapter=adapter)
            for conversation in self._grown(run):
                yield conversation.take() if params.output_kind is RequestOutputKind.DELTA else conversation.output

    @property
    def metrics(self) -> MetricsSnapshot:
        """Return the metrics of the engine and its plugins."""
        return self.control(ReadMetrics())

    def memory_report(self) -> MemoryReport:
        """Return the device memory in use, by purpose."""
        return self.control(ReportMemory())

    def get_metrics(self) -> list[Metric]:
        """Return ``metrics`` as a list, one entry for each name."""
        return list(self.metrics.families)

    def get_tokenizer(self) -> Tokenizer:
        """Return ``tokenizer``."""
        return self.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output, of the tokenizer and of generation_config.json."""
        return self._frontend.eos_token_ids

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of each prompt; see BeamSearchParams."""
        from hardpoint.engine.beam_search import beam_search

        return beam_search(self, prompt_list(prompts), params)

    def __getattr__(self, name: str) -> Any:
        """Say what to use in place of a method of vLLM's LLM that has no counterpart."""
        advice = _NO_COUNTERPART.get(name)
        raise AttributeError(f"LLM.{name} is vLLM's name: {advice}" if advice else f"LLM has no attribute {name!r}")

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Free memory until ``wake_up``; prompts are refused with EngineError until then.

        Level 1 frees the cache and scratch memory; level 2 also the weights, which ``wake_up`` reads from the
        checkpoint again. ``tags`` chooses among "kv", "resources" and "weights" instead. Cached prefixes are lost.
        Raises EngineError while requests are running, ConfigError for an unknown level or tag.
        """
        wanted = sleep_tags(level, tags)
        self.control(Sleep(wanted))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again: all of it, or ``tags``. Parts that are awake already are left alone.

        Raises CapacityError where the memory is no longer free; the remaining parts stay asleep.
        """
        wanted = TAGS if tags is None else check_tags(tags)
        self.control(WakeUp(wanted))

    def update_weights(self, source: str | Path | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights, awake or asleep, and drop cached prefixes. Cache and chosen kernels stay.

        ``source``: a folder or hub id of a checkpoint with the same settings, or its tensors by name (only for a core
        in this process). Raises CheckpointError for anything else: a bad folder changes nothing, bad tensors leave the
        engine without weights. Raises EngineError while requests are running.
        """
        self.control(UpdateWeights(str(source) if isinstance(source, Path) else source))

    def start_profile(self, folder: str | Path, layers: bool = False) -> None:
        """Profile the engine until ``stop_profile``; ``layers`` adds a range for each layer.

        Raises EngineError where a profile is running already, PlatformError for a platform without a profiler.
        """
        self.control(StartProfile(str(folder), layers))

    def stop_profile(self) -> None:
        """Write the profile into its folder: on most platforms a trace for Perfetto or Chrome."""
        self.control(StopProfile())

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self.control(ResetPrefixCache())

    def control(self, verb: Verb[R]) -> R:
        """Run a control verb in the core, between two steps. Raises RequestError for a closed LLM."""
        verb = verb.prepared()
        with self._lock:
            if self._closed:
                raise RequestError(_CLOSED)
            return self.client.control(verb)

    def close(self) -> None:
        """Free weights and caches. Open prompts fail, new ones are refused. A second call has no effect."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for run, _ in self._runs.values():
                    if run.num_open:
                        run.error = RequestError(_CLOSED)
                self.client.close()

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
        tokenized = self._frontend.read(prompt)
        self._frontend.check(self.client, params)
        with self._lock:
            if self._closed:
                raise RequestError(_CLOSED)
            conversation = self._frontend.converse(self.client, tokenized, params, **options)
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
                raise run.error
            if not run.num_open and not run.fresh:
                return

    def _step(self) -> None:
        try:
            advanced = self.client.step()
        except BaseException as error:  # an interrupt included: a core in this process has ended all its requests
            for request, (run, _) in self._runs.items():
                if request.finish_reason is not None and run.num_open:
                    run.error = EngineError(f"a step of the engine failed in another call: {error!r}")
                    run.error.__cause__ = error
            raise
        for request in advanced:
            if request in self._runs:
                run, conversation = self._runs[request]
                if request.error is not None:
                    run.error = request.error
                elif conversation.advance(request):
                    run.fresh[conversation] = None
                    run.num_open -= conversation.output.finished


_ONLY_TEXT = "models generate text; pooling models are not supported"
_NO_COUNTERPART = {
    **dict.fromkeys(("classify", "embed", "encode", "reward", "score"), _ONLY_TEXT),
    "apply_model": "use control(verb) with a verb of hardpoint.engine.control",
    "collective_rpc": "use control(verb) with a verb of hardpoint.engine.control; each runs on every rank",
    "llm_engine": "the engine's core is LLM.core, or use AsyncEngine",
    "preprocess_chat": "use render_chat or chat_prompt",
    "set_tokenizer": "start the engine with tokenizer=FOLDER",
}
_CLOSED = "this LLM is closed; make a new one"


def _start_here(config: EngineConfig) -> tuple[Frontend, CoreClient]:
    """Build a core that the callers' threads step. Only this needs torch here."""
    from hardpoint.engine.blueprint import draw
    from hardpoint.engine.core import EngineCore

    config = serve_other_ranks(config)
    blueprint = draw(config)
    mark("selection")
    frontend = Frontend.load(config, blueprint.folder)
    frontend.check_vocabulary(blueprint.facts.vocab_size)
    mark("tokenizer")
    return frontend, EngineCore.start(blueprint)


@dataclass
class _Run:
    """One call's conversations, how many are not finished, and which have grown since it last looked."""

    conversations: list[Conversation] = field(default_factory=list)
    num_open: int = 0
    fresh: dict[Conversation, None] = field(default_factory=dict)
    error: BaseException | None = None


def _one_each(name: str, given: object, kind: type[T], prompts: Sequence[object], *, none: bool = False) -> list[T]:
    """One ``kind`` for each prompt, from one for all or a sequence, which may hold None where ``none`` says so.

    Raises RequestError, naming the parameter.
    """
    if isinstance(given, kind):
        return [given] * len(prompts)
    kinds = (kind, type(None)) if none else (kind,)
    if not isinstance(given, Sequence) or not all(isinstance(each, kinds) for each in given):
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
