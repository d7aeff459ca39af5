"""``LLM``: prompts in, texts out, in one process. The names are those that users of vLLM know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from hardpoint.bench.stages import mark
from hardpoint.checkpoint.source import resolve_tokenizer
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.engine.conversation import Conversation
from hardpoint.engine.core import EngineCore, EngineStats
from hardpoint.engine.generation_config import GenerationConfig
from hardpoint.engine.outputs import RequestOutput
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.selection import SelectionTable
from hardpoint.tokenizer import ChatTemplate, Tokenizer
from hardpoint_plugin_api import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``."""


class LLM:
    """An engine with a tokenizer. Use it as a context manager, or ``close`` it, to free its memory early.

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
    ) -> list[RequestOutput]:
        """Continue every prompt; results are in the order of the prompts. ``use_tqdm`` shows a progress bar.

        Raises RequestError for a bad prompt, or CapacityError for one that can never fit, before anything runs.
        """
        many = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.default_sampling_params()] * len(many)
        else:
            params = list(sampling_params)
        if len(params) != len(many):
            raise RequestError(f"{len(many)} prompts, but {len(params)} sampling_params; give one, or one per prompt")
        open_: list[Conversation] = []
        try:
            for prompt, each in zip(many, params, strict=True):
                open_.append(self._open(prompt, each))
        except Exception:
            for conversation in open_:
                conversation.abort()
            raise
        with _progress(len(open_), show=use_tqdm and len(open_) > 1) as advance:
            for conversation in self._run(open_):
                if conversation.output.finished:
                    advance()
        return [conversation.output for conversation in open_]

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
        conversation = self._open(prompt, sampling_params or self.default_sampling_params())
        try:
            for each in self._run([conversation]):
                yield each.output
        finally:
            conversation.abort()

    def close(self) -> None:
        """Free weights and caches."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, prompt: Prompt, params: SamplingParams) -> Conversation:
        text, ids = self._tokens(prompt)
        return Conversation(self.core, self.tokenizer, text, ids, params, self._eos_token_ids)

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        own = self.tokenizer.eos_token_id
        return self._generation.eos_token_ids | (frozenset() if own is None else {own})

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                return self._tokens(prompt["prompt"])
            raise RequestError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
        return None, list(prompt)

    def _run(self, conversations: Sequence[Conversation]) -> Iterator[Conversation]:
        """Step until all are finished; yields a conversation each time its output grew."""
        by_request = {request: c for c in conversations for request in c.requests}
        left = len(conversations)
        while left:
            for request in self.core.step():
                conversation = by_request.get(request)
                if conversation is not None and conversation.advance(request):
                    left -= conversation.output.finished
                    yield conversation


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # one prompt of either kind
    return list(prompts)  # type: ignore[arg-type]  # a sequence of prompts


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
