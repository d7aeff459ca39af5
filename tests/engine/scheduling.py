"""A scheduler to test alone, and a device that remembers what it stored.

The device executes steps from their deltas alone, as a runner does. It checks that the cache holds just the tokens that
a request builds on, whoever stored them, and draws tokens by a rule that depends on all of them: so a request's output
is right only if nothing was lost, shared wrongly, overwritten too early or computed twice.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hardpoint.engine.requests import AdmittedRequest
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.block_pool import BlockPool
from hardpoint.engine.scheduling.paged_cache import CacheGeometry, PagedCache
from hardpoint.engine.scheduling.prefill_policy import PrefillPolicy
from hardpoint.engine.scheduling.request import Request
from hardpoint.engine.scheduling.scheduler import Scheduler, SchedulerArgs
from hardpoint.engine.scheduling.step import DRAFTED_AHEAD, StepInput, StepOutput
from hardpoint_plugin_api import NO_DRAFT, Retention, Span, StepLimits

BLOCK = 4
END = 1
"""The token that ends a request, where it may."""
MOST_DRAFTS = 6


def make_request(number: int, prompt: Sequence[int], output: int, **options: Any) -> Request:
    params = SamplingParams(temperature=0)
    stops = frozenset({END} if options.pop("may_stop", False) else ())
    return Request(AdmittedRequest(number, tuple(prompt), params, 0, stops, len(prompt) + output, **options))


def make_scheduler(
    pages: int,
    limits: StepLimits,
    prefix_caching: bool = True,
    spans: tuple[Retention, ...] = (Span(),),
    num_drafts: int = 0,
    drafts_ahead: bool = False,
    prefill: PrefillPolicy | None = None,
) -> Scheduler:
    assert limits.max_tokens is not None
    cache = PagedCache(BlockPool(pages), CacheGeometry(BLOCK, spans, limits.max_tokens), prefix_caching)
    return Scheduler(
        SchedulerArgs(cache, limits, 1000, prefix_caching, num_drafts, drafts_ahead, prefill or PrefillPolicy())
    )


def draw(tokens: Sequence[int]) -> int:
    """The next token: depends on every token before it."""
    state = 0
    for token in tokens:
        state = (state * 31 + token + 7) % 10007
    return state % 11


Drafter = Callable[[Sequence[int]], tuple[int, ...]]
"""Proposes tokens to follow those given."""


def drafting(most: int, wrong: float, seed: int = 0) -> Drafter:
    """A drafter of up to ``most`` tokens, each of which is another than will be drawn with probability ``wrong``."""

    def propose(tokens: Sequence[int]) -> tuple[int, ...]:
        choose = random.Random(f"{seed} {tokens}")
        right = list(tokens)
        for _ in range(most if wrong in (0, 1) else choose.randint(0, most)):
            right.append(draw(right) + (choose.random() < wrong))
        return tuple(right[len(tokens) :])

    return propose


def expected_output(request: Request) -> list[int]:
    """The expected tokens of ``request``, computed without any engine."""
    tokens = list(request.asked.prompt_token_ids)
    while len(tokens) < request.asked.max_total_tokens:
        tokens.append(draw(tokens))
        if tokens[-1] in request.asked.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


class Device:
    """Executes steps: slots with their tokens and each cache group's pages.

    The cache holds, by page and offset, the group that stored there and the tokens up to that one. A page of states
    holds those behind the last tokens, one more than there may be drafts: at place p modulo their number all tokens up
    to position p.
    """

    def __init__(
        self,
        limits: StepLimits,
        num_pages: int,
        spans: tuple[Retention, ...] = (Span(),),
        drafter: Drafter | None = None,
    ) -> None:
        self.limits, self.num_pages, self.spans, self.drafter = limits, num_pages, spans, drafter
        self.num_states = 1 + (MOST_DRAFTS if drafter else 0)
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[list[int]]] = {}
        self.stored: dict[int, int] = {}
        self.proposed: dict[int, tuple[int, ...]] = {}
        self.cache: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.num_computed = 0

    def execute(self, step: StepInput) -> StepOutput:
        for slot in step.freed:
            del self.tokens[slot], self.pages[slot], self.stored[slot]
        for new in step.new:
            assert new.slot not in self.tokens, "a slot is taken twice"
            self.tokens[new.slot], self.pages[new.slot] = list(new.token_ids), [[] for _ in self.spans]
        assert not {c.target for c in step.page_copies} & {c.source for c in step.page_copies}
        for group, source, target in step.page_copies:
            assert self.spans[group].per_sequence
            self.cache |= {
                (target, place): self.cache[source, place]
                for place in range(self.num_states)
                if (source, place) in self.cache
            }
        assert 0 < step.num_tokens <= (self.limits.max_tokens or 0)
        assert len(self.tokens) <= (self.limits.max_requests or 0)
        counts = [s.count for s in step.scheduled]
        assert counts == sorted(counts, key=lambda count: count > 1), "decodes come first"
        if not self.limits.mixed_phases and max(counts) > 1:
            reading = {s.slot for s in step.scheduled if s.start + s.count <= len(self.tokens[s.slot])}
            assert len(reading) == len(counts), "decodes and prompts share a step"
        drawn = []
        for share in step.scheduled:
            known, drafts = self.tokens[share.slot], list(share.drafts)
            if DRAFTED_AHEAD in drafts:
                drafts = (list(self.proposed[share.slot]) + [NO_DRAFT] * len(drafts))[: len(drafts)]
            tokens = known + drafts
            first_time = share.slot not in self.stored
            start = share.start if first_time else self.stored[share.slot]
            assert share.start - share.slack <= start <= share.start, "tokens are computed once and in order"
            end = start + share.count
            assert end <= len(tokens), "a token runs before it was drawn"
            for group, (pages, new_pages) in enumerate(zip(self.pages[share.slot], share.new_pages, strict=True)):
                pages += new_pages
                needed = -(-end // BLOCK)
                assert len(pages) == needed if self.drafter is None else len(pages) >= needed, (
                    "pages for what is stored"
                )
                assert len(pages) * BLOCK >= share.start + share.count, "pages for all that may be stored"
                if self.spans[group].per_sequence:
                    page = pages[(end - 1) // BLOCK]
                    assert 0 < page < self.num_pages
                    if start:
                        place = (start - 1) % self.num_states
                        assert self.cache[page, place] == (group, tuple(tokens[:start])), "another state"
                    for position in range(max(start, end - self.num_states), end):
                        self.cache[page, position % self.num_states] = group, tuple(tokens[: position + 1])
                    continue
                first = self.spans[group].first(start)
                assert all(0 < page < self.num_pages for page in pages[first // BLOCK :])
                for position in range(first, start):
                    held = self.cache.get((pages[position // BLOCK], position % BLOCK))
                    assert held == (group, tuple(tokens[: position + 1])), "the cache holds something else"
                for position in range(start, end):
                    self.cache[pages[position // BLOCK], position % BLOCK] = group, tuple(tokens[: position + 1])
            self.num_computed += share.count
            self.stored[share.slot] = end
            if end < len(tokens):
                assert share.count % self.limits.chunk_multiple == 0
            assert share.samples == (end == len(tokens))
            if share.samples:
                first_drawn = len(known)
                assert share.first_drawn <= first_drawn <= share.first_drawn + share.slack
                known.append(draw(known))
                for draft in drafts:
                    if draft != known[-1]:
                        break
                    known.append(draw(known))
                drawn.append(tuple(known[first_drawn:]))
                self.stored[share.slot] = len(known) - 1
                self.proposed[share.slot] = self.drafter(known) if self.drafter else ()
        written = [
            page
            for share in step.scheduled
            for pages, span in zip(self.pages[share.slot], self.spans, strict=True)
            for page in (pages[-1:] if span.per_sequence else pages[share.start // BLOCK :])
        ]
        assert len(written) == len(set(written)), "two requests write to one page"
        proposed = tuple(self.proposed[s.slot] for s in step.scheduled if s.samples) if self.drafter else ()
        return StepOutput(step.number, tuple(drawn), drafts=proposed)


def submit_ahead(scheduler: Scheduler, device: Device, submitted: deque[StepOutput], depth: int) -> None:
    """Execute steps until ``depth`` are ahead, as an engine's core does."""
    while len(submitted) <= depth and not scheduler.needs_values and (step := scheduler.schedule()) is not None:
        submitted.append(device.execute(step))


def run(scheduler: Scheduler, device: Device, depth: int) -> None:
    """Run until nothing is left, ``depth`` steps ahead."""
    submitted: deque[StepOutput] = deque()
    for _ in range(10_000):
        submit_ahead(scheduler, device, submitted, depth)
        if not submitted:
            assert not scheduler.has_unfinished, "work is left and nothing runs"
            return
        scheduler.commit(submitted.popleft())
    pytest.fail("requests do not end")
