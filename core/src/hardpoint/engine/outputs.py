"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability and its rank, 1 for the likeliest; equally likely tokens share theirs."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""By token id: the token that stands at a position, then the likeliest ones that were asked for."""


@dataclass
class CompletionOutput:
    """One continuation. ``stop_reason`` is the text or token id that ended it, or None for the model's own end.

    Where they were asked for, ``logprobs`` has an entry for each of ``token_ids``, and ``cumulative_logprob`` is the
    sum over those tokens. ``text_ends`` says for each of ``token_ids`` how long ``text`` was once it was taken.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    text_ends: list[int] = field(default_factory=list, repr=False)

    def finished(self) -> bool:
        """True once nothing more will come."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds since the request was accepted; None until it happened."""

    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """A request and what came of it so far: as many outputs as completions were asked for.

    ``num_cached_tokens`` of the prompt were found in the prefix cache when its first token was drawn.

    ``prompt_logprobs``, where they were asked for, has an entry for each prompt token, None for the first. It is there
    as soon as the first token is drawn.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
