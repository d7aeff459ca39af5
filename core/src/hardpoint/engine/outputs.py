"""The results of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]


class RequestOutputKind(Enum):
    """The content of a stream's outputs: everything so far, only the new part, or everything and only at the end.

    CUMULATIVE copies the whole text for every token; DELTA costs the same for each token.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


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
    """One completion, or a part of one. ``stop_reason``: the text or token id that ended it; None for the model's own
    end.

    A part begins ``start`` characters into the whole text. ``text_ends``: for each of ``token_ids``, the length of the
    whole text, in characters, after that token. ``logprobs``, if asked for: an entry for each of ``token_ids``;
    ``cumulative_logprob`` is the sum over all tokens so far. ``routed_experts``, if asked for, comes with
    ``finish_reason``: int16 [tokens, layers with experts, experts per token], the ids of the experts that the router
    chose for every token but the last, which no step has run. An aborted completion has none.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    text_ends: list[int] = field(default_factory=list, repr=False)
    start: int = 0
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, repr=False, compare=False)

    def extend(self, more: CompletionOutput) -> None:
        """Append the part that follows this one."""
        self.text += more.text
        self.token_ids += more.token_ids
        self.text_ends += more.text_ends
        if self.logprobs is not None and more.logprobs is not None:
            self.logprobs += more.logprobs
        self.cumulative_logprob = more.cumulative_logprob
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason
        self.routed_experts = more.routed_experts

    def finished(self) -> bool:
        """True once nothing more will come."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds since the request was accepted; None until it happened."""

    started: float | None = None
    """Of the first step that computed some of it."""
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """The result of a request so far, with one entry of ``outputs`` for each completion.

    In a stream of RequestOutputKind.DELTA, ``outputs`` holds the new parts of completions that grew.
    ``num_cached_tokens``: tokens of the prompt that the prefix cache had. ``prompt_logprobs``, if asked for: an entry
    for each prompt token, None for the first; available with the first output token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0

    def extend(self, more: RequestOutput) -> None:
        """Append the text and tokens of ``more``, which follow these; every other field is taken from ``more``."""
        known = {output.index: output for output in self.outputs}
        for output in more.outputs:
            if output.index in known:
                known[output.index].extend(output)
            else:
                self.outputs.append(output)
                self.outputs.sort(key=lambda each: each.index)
        self.finished, self.metrics = more.finished, more.metrics
        self.prompt_logprobs, self.num_cached_tokens = more.prompt_logprobs, more.num_cached_tokens
