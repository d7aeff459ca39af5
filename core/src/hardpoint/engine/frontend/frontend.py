"""The text side of an engine, which LLM and AsyncEngine share: from what users give to conversations with a core."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreClient, OwnedCore, RequestOptions, StartCore
from hardpoint.engine.frontend.conversation import Conversation
from hardpoint.engine.frontend.generation_config import GenerationConfig
from hardpoint.engine.frontend.prompts import Prompt, TokenizedPrompt
from hardpoint.engine.locations import model_location, tokenizer_of
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.admission import ContextLengthError
from hardpoint.parsers import Parsers, choose_parsers
from hardpoint.structured import Trials
from hardpoint.tokenizer import ChatTemplate, NoTokenizer, Tokenizer, read_tokenizer_config
from hardpoint.tokenizer.mistral_chat import load_chat_template
from hardpoint_plugin_api import CheckpointError, RequestError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hardpoint.engine.remote.shared_core import SharedCore

logger = logging.getLogger(__name__)


class Frontend:
    """A checkpoint's tokenizer, chat template and defaults. Several threads may use it."""

    def __init__(
        self,
        tokenizer_folder: Path,
        tokenizer: Tokenizer,
        generation: GenerationConfig,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Without ``chat_template`` the folder's own counts, read when it is first asked for."""
        self.tokenizer = tokenizer
        self._folder, self._generation = tokenizer_folder, generation
        self._chat_template = chat_template
        self._trials = Trials(tokenizer)

    @classmethod
    def load(cls, config: EngineConfig, folder: Path) -> Frontend:
        """Read what the checkpoint in ``folder`` has beside its weights, and the user's chat template.

        Raises CheckpointError, and ConfigError for that template.
        """
        tokenizer_folder = tokenizer_of(config, folder)
        tokenizer = NoTokenizer() if config.skip_tokenizer_init else Tokenizer.load(tokenizer_folder)
        own = config.chat_template
        template = None if own is None else ChatTemplate.of_file(Path(own).expanduser(), tokenizer.special_tokens)
        return cls(tokenizer_folder, tokenizer, GenerationConfig.read(folder), template)

    def default_sampling_params(self) -> SamplingParams:
        """The parameters of the checkpoint's generation_config.json; greedy where it has none."""
        return self._generation.sampling_params()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation as the model expects it; see ChatTemplate.render."""
        if isinstance(self.tokenizer, NoTokenizer):
            raise RequestError("no tokenizer was loaded (--skip-tokenizer-init), so there are no chats; send token ids")
        return self._template().render(messages, **options)

    def tokenizer_config(self) -> dict[str, Any]:
        """The checkpoint's ``tokenizer_config.json`` with the named special tokens, and the chat template in use, if
        there is one."""
        try:
            template = {"chat_template": self._template().text}
        except RequestError:
            template = {}
        return read_tokenizer_config(self._folder) | self.tokenizer.special_tokens | template

    def choose_parsers(self, config: EngineConfig) -> Parsers:
        """Choose the parsers of the model's output; see parsers.choice.choose_parsers."""
        return choose_parsers(
            config,
            chat_template=self._template().text,
            special_tokens=self.tokenizer.added_tokens,
        )

    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            self._chat_template = load_chat_template(self._folder, self.tokenizer.special_tokens)
        return self._chat_template

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """A conversation as a prompt: its text, and its tokens, which hold the special ones that the template wrote."""
        text = self.render_chat(messages, **options)
        return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens=False)}

    def encode(self, text: str, max_model_len: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of ``text``. Raises ContextLengthError where they leave no room within ``max_model_len``."""
        self._check_length(text, max_model_len)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def read(self, prompt: object, max_model_len: int | None = None) -> TokenizedPrompt:
        """A prompt in any of its forms; raises RequestError for anything else, and what ``encode`` does."""
        if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
            self._check_length(prompt.get("prompt"), max_model_len)
        else:
            self._check_length(prompt, max_model_len)
        return TokenizedPrompt.read(prompt, self.tokenizer)

    def _check_length(self, text: object, max_model_len: int | None) -> None:
        if isinstance(text, str) and max_model_len is not None and self.tokenizer.exceeds(text, max_model_len):
            raise ContextLengthError(None, max_model_len)

    def check(self, core: CoreClient, params: SamplingParams) -> None:
        """Raise RequestError for parameters that this engine does not serve, such as a structure that cannot be
        compiled. To be called before ``converse``; it may take time.
        """
        most = core.facts.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs") if most is not None else ():
            count = getattr(params, name)
            if count is not None and not 0 <= count <= most:
                raise RequestError(f"{name} must be at most {most} (--max-logprobs), got {count}")
        if params.return_routed_experts and not core.facts.config.enable_return_routed_experts:
            raise RequestError(
                "return_routed_experts: this engine keeps no record of routed experts; start it with "
                "--enable-return-routed-experts"
            )
        if params.stop_texts and core.facts.config.skip_tokenizer_init:
            raise RequestError("stop: an engine without tokenizer makes no text; give stop_token_ids")
        if params.structured is not None:
            self._trials.check(params.structured, core.facts.vocab_size)

    def converse(
        self,
        core: CoreClient,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        request_id: str | None = None,
        seed: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Conversation:
        """Queue ``prompt``, or the part of it that ``params`` asks for; see Conversation.

        Raises RequestError for a replica that this server does not have.
        """
        core.facts.config.check_data_parallel_rank(options.get("data_parallel_rank"))
        if params.truncate_prompt_tokens is not None:
            longest = core.facts.max_model_len
            prompt = prompt.truncated(params.truncate_prompt_tokens, params.truncation_side, longest)
        if prompt.cache_salt:
            options["cache_salt"] = prompt.cache_salt
        return Conversation(core, self.tokenizer, prompt, params, self.eos_token_ids, request_id, seed, **options)

    def check_vocabulary(self, size: int, *, is_told: bool = True) -> None:
        """Compare the tokenizer with the model's vocabulary of ``size``. Fewer tokens than that are usual: vocabularies
        are padded. Log a warning, unless ``is_told`` is False, where the tokenizer has ids beyond.

        Raises CheckpointError where such an id is put around every text, so that no text could be encoded.
        """
        highest = self.tokenizer.highest_id
        if highest < size:
            return
        ids, do = (f"ids {size} to {highest}", "do") if highest > size else (f"id {size}", "does")
        where = f"{ids} of the tokenizer in {self._folder}"
        differs = f"{where} {do} not exist in the model, whose vocabulary has {size} tokens"
        around = sorted(i for i in self.tokenizer.encode("") if i >= size)
        if around:
            raise CheckpointError(
                f"{differs}, and id {around[0]} is put around every text: no text can be encoded; name the model's "
                "tokenizer (--tokenizer), or send token ids (--skip-tokenizer-init)"
            )
        if is_told:
            logger.warning("%s; requests that hold them are refused (--tokenizer names the tokenizer)", differs)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output."""
        own = self.tokenizer.eos_token_id
        return self._generation.eos_token_ids | (frozenset() if own is None else {own})


def connect(config: EngineConfig, *, own_process: bool, start: StartCore | None = None) -> tuple[Frontend, OwnedCore]:
    """Start a core in a process of its own, or in a thread of this one, and read its checkpoint's text side meanwhile.

    ``start`` takes the place of start_core. Raises what either raises, with nothing left behind. Needs no torch where
    the core has its own process.
    """
    config = serve_other_ranks(config)
    folder = model_location(config)
    core = (start or start_core)(config, own_process=own_process)
    try:
        frontend = Frontend.load(config, folder)
        core.wait_until_ready(config.core_start_timeout if own_process else None)
        frontend.check_vocabulary(core.facts.vocab_size)
    except BaseException:
        core.close()
        raise
    return frontend, core


def start_core(config: EngineConfig, *, own_process: bool) -> OwnedCore:
    """Start a core in a process of its own, or in a thread of this one; one for each replica. It is loading then.

    ``config`` is that of ``serve_other_ranks``.
    """
    from hardpoint.engine.remote.core_process import ProcessLink  # a core that its callers step needs none of these
    from hardpoint.engine.remote.remote_core import RemoteCore, ThreadLink

    if config.topology.shares_experts and config.executor_kind == "torchrun":
        from hardpoint.engine.remote.launched_replica import LaunchedLink, LaunchedReplica

        return LaunchedReplica(LaunchedLink, config)
    if config.topology.shares_experts:
        from hardpoint.engine.remote.sharing_replicas import SharingReplicas

        return SharingReplicas(ProcessLink, config)
    if len(config.local_replicas) > 1:
        from hardpoint.engine.remote.replicas import Replicas

        return Replicas(partial(RemoteCore, ProcessLink), config)
    return RemoteCore(ProcessLink if own_process else ThreadLink, config)


def connect_shared(
    config: EngineConfig, connection: Connection, *, is_first: bool = True
) -> tuple[Frontend, SharedCore]:
    """Take part in a core that another process shares by a Hub, and read the checkpoint's text side meanwhile.

    Only a process that ``is_first`` warns of a tokenizer that differs from the model. Raises what either raises, with
    nothing left behind. Needs no torch.
    """
    from hardpoint.engine.remote.shared_core import SharedCore

    core = SharedCore(connection)
    try:
        frontend = Frontend.load(config, model_location(config))
        core.wait_until_ready()
        frontend.check_vocabulary(core.facts.vocab_size, is_told=is_first)
    except BaseException:
        core.close()
        raise
    return frontend, core


def serve_launched(config: EngineConfig) -> EngineConfig:
    """The first step of a server that torchrun may have started, while signals still end it at once. In the process of
    another rank than a replica's first it serves as that rank, and does not return. In the first's it meets the others,
    and sees to it that SIGTERM comes, once the launcher is gone that would have sent it."""
    if config.executor_kind == "torchrun":
        config = serve_other_ranks(config, outlives_signals=True)
        from hardpoint.engine.execution.ranks.launch import when_orphaned

        when_orphaned(partial(os.kill, os.getpid(), signal.SIGTERM))
    return config


def serve_other_ranks(config: EngineConfig, *, outlives_signals: bool = False) -> EngineConfig:
    """Return where an engine is to be built, with its config, which may be that of one of several replicas.

    A process that torchrun started for another rank than a replica's first never does. ``outlives_signals``: such a
    process leaves SIGTERM and SIGINT, which torchrun sends to all, to rank 0 once it serves, as ranks of ``mp`` do.
    """
    if config.executor_kind == "torchrun":
        from hardpoint.engine.execution.ranks.torchrun_executor import serve_unless_first

        return serve_unless_first(config, outlives_signals=outlives_signals)
    return config
