"""How prompts share the tokens of a step, so that a long one does not hold up the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from hardpoint_plugin_api import StepLimits


@dataclass(frozen=True)
class PrefillPolicy:
    """The shares of prompts in a step.

    A prompt with more than ``threshold`` tokens to compute is long. While others of its priority want tokens, it gets
    ``threshold`` of a step, and beyond these what the others leave. More important requests come before it. Of equally
    important requests up to ``max_partial`` long prompts are read at a time. ``threshold`` 0: no prompt is long.

    Example: of a step with 2,048 tokens and a threshold of 512, a prompt of 30,000 tokens gets 1,948 beside a waiting
    prompt of 100, and 1,536 beside one of 2,000, which gets the other 512.
    """

    threshold: int = 0
    max_partial: int = 1

    @classmethod
    def within(cls, limits: StepLimits, threshold: int | None, max_partial: int) -> Self:
        """A policy for steps of ``limits``, whose maximum of tokens is set; the default threshold is a quarter of it.

        A threshold is at least the least number of tokens of a prompt that such a step takes.
        """
        assert limits.max_tokens is not None
        if threshold is None:
            threshold = limits.max_tokens // 4
        return cls(max(threshold, limits.chunk_multiple) if threshold else 0, max_partial)

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt with ``num_tokens`` tokens to compute is long."""
        return 0 < self.threshold < num_tokens

    def share(self, num_tokens: int) -> int:
        """The tokens that other prompts leave to one with ``num_tokens`` to compute."""
        return min(num_tokens, self.threshold) if self.threshold else num_tokens

    def num_startable(self, priority: int, partial: Iterable[int]) -> int:
        """How many long prompts of ``priority`` may start to be read while those of the priorities ``partial`` are."""
        return max(0, self.max_partial - sum(other <= priority for other in partial))

    def room(self, priority: int, budget: int, others: Iterable[tuple[int, int]]) -> int:
        """The most tokens that a long prompt of ``priority`` takes of a step that has ``budget`` left.

        ``others`` are the priorities of requests that the step is yet to look at, each with the tokens that it wants.
        They are read as far as they matter.
        """
        urgent = peers = 0
        for other, wanted in others:
            if other < priority:
                urgent += wanted
            elif other == priority or wanted == 1:  # a decode costs next to nothing
                peers += self.share(wanted)
            if urgent + peers >= budget:
                break
        left = max(0, budget - urgent)
        return max(min(self.threshold, left), left - peers)
