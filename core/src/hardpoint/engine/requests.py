"""A request between front end and core: what it asks for, what comes of it, and what is new since the last time.

Plain, picklable, no torch. A core keeps more about a request: see scheduling/request.py.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hardpoint.engine.outputs import FinishReason
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.step import TokenLogprobs
from hardpoint_plugin_api import HardpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class AdmittedRequest:
    """A request for one completion. Nobody changes it.

    ``number`` is unique within the front end that admitted it, and orders requests by age. Of two waiting requests the
    one with the lower ``priority`` runs first, then the older one. ``deadline`` is a time of ``time.monotonic``, after
    which the request ends. ``cache_salt`` keeps its cached prefix from requests with another salt. ``bad_words`` are
    token sequences that its output never completes. ``adapter_name`` is that of a loaded LoRA adapter, or empty for
    none. ``prompt_array`` has the prompt's ids as int32, where they were read that way already.
    ``data_parallel_rank`` is the replica that serves it, None for any.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_array: array[int] | None = None
    adapter_name: str = ""
    data_parallel_rank: int | None = None

    @property
    def needs_all_logits(self) -> bool:
        """True where every token of the prompt must run through the model, so that no cached prefix can be used."""
        return self.params.prompt_logprobs is not None


@dataclass(frozen=True)
class Delta:
    """The tokens and the state that a request got since its last delta. ``started`` is as in RequestProgress.

    ``prompt_logprobs`` come once, whole, with the first token; ``routed_experts`` once, with ``finish_reason``.
    """

    number: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int
    num_preemptions: int
    started: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    routed_experts: npt.NDArray[np.int16] | None = None


@dataclass(eq=False)
class RequestProgress:
    """The progress of a request, as a front end sees it. ``token_ids`` begin with the prompt.

    ``started``: when its first step was scheduled, by ``time.monotonic``.
    ``finish_reason`` is set once it has ended. ``error`` says why the engine ended it, where that was a failure.

    Where its parameters ask for them, ``logprobs`` has an entry for each drawn token and ``prompt_logprobs`` one for
    each token of the prompt, None for the first; the latter is complete with the first drawn token. ``routed_experts``
    are as in CompletionOutput.
    """

    asked: AdmittedRequest
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    started: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: HardpointError | None = None
    routed_experts: npt.NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.asked.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if self.asked.needs_all_logits:
            self.prompt_logprobs = [None] * self.num_prompt_tokens

    @property
    def number(self) -> int:
        """See AdmittedRequest."""
        return self.asked.number

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens drawn so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def take(self, delta: Delta) -> None:
        """Append what is new, and take the state that it came to."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        self.num_cached_tokens, self.num_preemptions = delta.num_cached_tokens, delta.num_preemptions
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.started, self.routed_experts = delta.started, delta.routed_experts

    def since(self, num_known: int, number: int | None = None) -> Delta:
        """The news behind the first ``num_known`` of its tokens, of which the prompt is always known. ``number``: its
        number where it is sent; None: its own."""
        drew_first = num_known == self.num_prompt_tokens < len(self.token_ids)
        return Delta(
            self.asked.number if number is None else number,
            tuple(self.token_ids[num_known:]),
            self.finish_reason,
            self.stop_reason,
            self.num_cached_tokens,
            self.num_preemptions,
            self.started,
            tuple(self.logprobs[num_known - self.num_prompt_tokens :]),
            tuple(self.prompt_logprobs) if drew_first else (),
            self.routed_experts,
        )
