"""How prompts share the tokens of a step, so that a long one does not hold up the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from hardpoint_plugin_api import StepLimits


@dataclass(frozen=True)
class PrefillPolicy:
    """The shares of prompts in a step.

    A prompt with more than ``threshold`` tokens to compute is long; 0: none is. A long prompt shares a step with the
    other requests of its priority: shares are max-min fair, so that no request gets less than it wants while a long
    prompt gets more. More important requests take their tokens first; of the rest a long prompt gets at least
    ``guarantee``. It starts only while fewer than ``max_partial`` long prompts of the same or a higher priority are
    being read. Shorter prompts may start before it.

    Example: of a step with 2,048 tokens a prompt of 30,000 gets 1,948 beside a waiting prompt of 100, and 1,024 beside
    one of 2,000.
    """

    threshold: int = 0
    max_partial: int = 1
    guarantee: int = 1

    @classmethod
    def within(cls, limits: StepLimits, threshold: int | None, max_partial: int) -> Self:
        """A policy for steps of ``limits``, whose maximum of tokens is set, and is the default threshold.

        All long prompts together are guaranteed half of a step, each at least the least chunk of a prompt.
        """
        assert limits.max_tokens is not None
        threshold = limits.max_tokens if threshold is None else threshold
        return cls(threshold, max_partial, max(limits.max_tokens // (2 * max_partial), limits.chunk_multiple))

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt with ``num_tokens`` tokens to compute is long."""
        return 0 < self.threshold < num_tokens

    def num_startable(self, priority: int, partial: Iterable[int]) -> int:
        """How many long prompts of ``priority`` may start to be read while those of the priorities ``partial`` are."""
        return max(0, self.max_partial - sum(other <= priority for other in partial))

    def room(self, priority: int, budget: int, others: Iterable[tuple[int, int]]) -> int:
        """The most tokens that a long prompt of ``priority`` takes of a step that has ``budget`` left.

        ``others`` are the priorities of requests that the step is yet to look at, each with the tokens that it wants.
        They are read as far as they matter.
        """
        urgent = guaranteed = 0
        peers: list[int] = []
        for other, wanted in others:
            if other < priority:
                urgent += wanted
            elif other == priority or wanted == 1:  # a decode costs next to nothing
                peers.append(wanted)
                guaranteed += min(wanted, self.guarantee)
            if urgent + guaranteed >= budget:
                break
        left = max(0, budget - urgent)
        return max(min(self.guarantee, left), _fair_share(left, peers))


def _fair_share(budget: int, others: list[int]) -> int:
    """The max-min fair share of one that wants all of ``budget``, beside ``others`` that want as much as they say."""
    sharing = len(others) + 1
    for wanted in sorted(others):
        if wanted * sharing > budget:
            break
        budget -= wanted
        sharing -= 1
    return budget // sharing
