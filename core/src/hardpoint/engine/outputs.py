"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class CompletionOutput:
    """One continuation. ``stop_reason`` is the text or token id that ended it, or None for the model's own end."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

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
    """A request and what came of it so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
