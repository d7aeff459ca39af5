"""What passes between scheduler and runner: a step as a delta, and its result. Plain, picklable, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlotSampling:
    """How a slot's tokens are drawn."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True)
class NewRequest:
    """A request that takes a slot: all its known tokens (those drawn before a preemption included)."""

    slot: int
    token_ids: tuple[int, ...]
    sampling: SlotSampling


@dataclass(frozen=True)
class ScheduledRequest:
    """One slot's share of a step: ``count`` tokens from position ``start``, into its pages and ``new_pages``.

    ``samples`` says whether the last of them is the newest token, so that the next one is drawn.
    """

    slot: int
    start: int
    count: int
    new_pages: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class StepInput:
    """One step. Slots in ``freed`` are given up before those in ``new`` are taken. Decodes come first."""

    number: int
    freed: tuple[int, ...]
    new: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in this step."""
        return sum(s.count for s in self.scheduled)


@dataclass(frozen=True)
class StepOutput:
    """The token drawn for each slot that samples, in the order of the step."""

    number: int
    tokens: tuple[int, ...]
