"""Messages between scheduler and runner: a step as a delta, and its result. Plain, picklable, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self


@dataclass(frozen=True)
class SlotSampling:
    """How a slot's tokens are drawn, and what is reported of them. The defaults change and report nothing.

    ``bad_words`` are token sequences that the output never completes. ``stop_token_ids`` are not drawn among the first
    ``min_tokens`` tokens. ``logprobs`` and ``prompt_logprobs`` count likeliest tokens, -1 means all.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class NewRequest:
    """A request that takes a slot: all its known tokens, of which the first ``num_prompt_tokens`` are the prompt, best
    as an array of int32.

    The others were drawn before it was preempted. ``adapter`` is the slot of its LoRA adapter, -1 where it has none.
    """

    slot: int
    token_ids: Sequence[int]
    sampling: SlotSampling
    num_prompt_tokens: int
    adapter: int = -1


DRAFTED_AHEAD = -2
"""In place of a draft: the one that the slot's last draw led to, which the device alone knows so far."""


@dataclass(slots=True)
class ScheduledRequest:
    """One slot's share of a step: ``count`` tokens from position ``start``, into its pages and ``new_pages``.

    ``new_pages`` has, for each cache group, equally many pages: those of the slot's next blocks. ``samples`` says
    whether the share reaches the newest token, so that the next one is drawn. ``drafts`` stand behind the newest token
    and are the last of the ``count`` tokens: a token is drawn behind the newest one and behind each draft, and counts
    as long as all drafts before it are what was drawn in their places.

    ``slack`` counts drafts of steps in flight: ``start`` stands as if all of them were right. The device knows how many
    were, and starts as much earlier; pages suffice for either.

    ``allowed`` says which tokens each of those draws may give: a bit for each of the vocabulary, lowest first. It is
    empty where all may come.

    Nobody changes it; it is not frozen, as one is made for each request in each step, which would take six times as
    long.
    """

    slot: int
    start: int
    count: int
    new_pages: tuple[tuple[int, ...], ...]
    samples: bool
    allowed: tuple[bytes, ...] = ()
    drafts: tuple[int, ...] = ()
    slack: int = 0

    @property
    def first_drawn(self) -> int:
        """The position of the first token that it draws, with no draft in flight right."""
        return self.start + self.count - len(self.drafts) - self.slack


class PageCopy(NamedTuple):
    """A page of a cache group, in all its places, is copied to another."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class StepInput:
    """One step. Slots in ``freed`` are given up before those in ``new`` are taken. Decodes come first.

    ``page_copies`` are done before the model runs, in order of their groups. No page is the target of one and part of
    another.

    Where replicas share experts, ``replica_tokens`` says how many tokens each of them has in this step, padding
    included. ``captured_tokens`` is then their number on every replica where all may replay captured graphs, and 0
    elsewhere. None: no other replica has a say.
    """

    number: int
    freed: tuple[int, ...]
    new: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    page_copies: tuple[PageCopy, ...] = ()
    replica_tokens: tuple[int, ...] = ()
    captured_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in this step."""
        return sum(s.count for s in self.scheduled)

    @property
    def is_empty(self) -> bool:
        """Whether it was made by ``empty``."""
        return self.number < 0

    @classmethod
    def empty(cls, slot: int, num_groups: int) -> Self:
        """A step of one token of ``slot``, which no request has: its pages are null pages, and nothing is drawn.

        ``num_groups`` is the number of cache groups.
        """
        return cls(-1, (), (), (ScheduledRequest(slot, 0, 1, ((),) * num_groups, samples=False),))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, then of the likeliest, likeliest first.

    Three lists of one length. Ranks count from 1; equally likely tokens share theirs.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from position ``start``: what one step read of one prompt.

    ``index`` is the request's place among the step's scheduled ones.
    """

    index: int
    start: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class StepOutput:
    """The ``tokens`` drawn for each slot that samples, in the order of the step: right drafts, and one token more.

    ``logprobs`` is empty where no slot asks for them, else it goes with ``tokens``, None for slots that do not ask.
    ``drafts`` may follow each slot's tokens in its next step; it is empty where nothing drafts.
    """

    number: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
