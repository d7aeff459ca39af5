"""The scheduler selects the requests of the next step, their token counts and their pages.

It never needs a token's value: ``schedule`` advances counts and pages as a step is submitted, ``commit`` takes values
when they arrive, up to a step later; a token drawn for a request that had ended meanwhile is dropped. Requests run in
the order of their precedence; one that finds no page preempts the last of those that run, which is computed again
later. The next tokens that a structured output allows do depend on values: see ``needs_values``.

A step that verifies drafts advances by their number, which is the most that can come of it; ``commit`` takes back what
was not drawn. Until then counts are bounds, and the device knows the lengths that they bound. Pages that were taken
stay with the request.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from hardpoint.engine.outputs import FinishReason
from hardpoint.engine.scheduling.paged_cache import Growth, HeldPages, PagedCache, Prefix
from hardpoint.engine.scheduling.prefill_policy import PrefillPolicy
from hardpoint.engine.scheduling.request import Request
from hardpoint.engine.scheduling.step import (
    DRAFTED_AHEAD,
    NewRequest,
    PageCopy,
    ScheduledRequest,
    StepInput,
    StepOutput,
)
from hardpoint.engine.scheduling.waiting import WaitingQueue
from hardpoint.structured import StructureState
from hardpoint_plugin_api import CapacityError, RequestError, StepLimits


@dataclass(frozen=True)
class SchedulerArgs:
    """The arguments of a scheduler. ``limits`` has its maxima set.

    Steps propose up to ``num_drafts`` drafts. With ``drafts_ahead`` a step may verify drafts that the step before it is
    yet to propose; otherwise steps that draw are to be committed before.
    """

    cache: PagedCache
    limits: StepLimits
    max_model_len: int
    prefix_caching: bool = True
    num_drafts: int = 0
    drafts_ahead: bool = False
    prefill: PrefillPolicy = field(default_factory=PrefillPolicy)


@dataclass
class _Share:
    """A request's part in a step."""

    request: Request
    scheduled: ScheduledRequest


@dataclass
class _ScheduledStep:
    """A step, from being put together to being committed. ``released`` are pages to free once it is done.

    A page stands there once for each holder that gives it up. ``needs_values`` is as in Scheduler. ``looked_at`` are
    the running requests that the step looks at, one after the other. ``owed_tokens`` and ``owed_pages`` are those that
    requests need which are yet to be looked at: no draft takes them.
    """

    budget: int
    looked_at: Sequence[Request] = ()
    owed_tokens: int = 0
    owed_pages: int = 0
    shares: list[_Share] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    preempted: bool = False
    needs_values: bool = False
    released: list[int] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)


class Scheduler:
    """Holds every unfinished request. Steps are committed in the order in which they were scheduled."""

    def __init__(self, args: SchedulerArgs) -> None:
        self.cache, self.limits, self.max_model_len = args.cache, args.limits, args.max_model_len
        assert self.limits.max_tokens is not None
        assert self.limits.max_requests is not None
        self._prefix_caching = args.prefix_caching
        self._num_drafts_ahead = args.num_drafts if args.drafts_ahead else 0
        self._waits_for_drafts = args.num_drafts > 0 and not args.drafts_ahead
        self._num_drafts = args.num_drafts
        self._prefill = args.prefill
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._free_slots = list(range(self.limits.max_requests - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._in_flight: deque[_ScheduledStep] = deque()
        self._promised: Request | None = None
        self._number = 0
        self.num_cached_tokens = 0
        """Tokens of prompts that were found in the prefix cache, of all requests so far."""
        self.num_drawn = self.num_drafted = self.num_accepted = 0
        """Tokens that requests got so far; drafts that steps verified, and how many of them were right."""

    @property
    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def unfinished(self) -> list[Request]:
        """The requests that wait or run."""
        return [*self._running, *self._waiting]

    @property
    def needs_values(self) -> bool:
        """True while a step in flight draws tokens on whose values the next step depends: commit it first."""
        return any(step.needs_values for step in self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue ``request``. Raises CapacityError if even the empty pool could not hold all its tokens."""
        usable, longest = self.cache.pool.num_usable, request.asked.max_total_tokens
        if self.cache.geometry.pages_for(longest) > usable:
            raise CapacityError(
                f"request {request.number} may reach {longest} tokens, the cache holds "
                f"{self.cache.geometry.longest(usable, longest)}; raise --kv-cache-memory, or lower max_tokens"
            )
        self._watch_deadline(request)
        self._waiting.add(request, self._is_long(request))

    def _is_long(self, request: Request) -> bool:
        """Whether the prompt of ``request`` is long, without what is cached of it now."""
        if not self._prefill.is_long(request.num_to_compute):
            return False
        cached = self._cached_prefix(request).num_blocks * self.cache.geometry.block_size
        return self._prefill.is_long(request.num_to_compute - cached)

    def _watch_deadline(self, request: Request) -> None:
        """Have ``expire`` find ``request``. Requests that ended long before their deadlines are forgotten now and
        then."""
        deadline = request.asked.deadline
        if deadline is None or deadline == math.inf:
            return
        if len(self._deadlines) > 2 * (self.num_running + self.num_waiting) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].finish_reason is None]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, request.number, request))

    def abort(self, request: Request, stop_reason: str | None = None) -> None:
        """End ``request`` now; one that has ended already is left alone."""
        if request.finish_reason is None:
            self._end(request, "abort")
            request.stop_reason = stop_reason

    def abandon(self) -> None:
        """End every request and forget every step in flight: a step has failed, and what it stored is unknown."""
        for step in self._in_flight:
            for share in step.shares:
                share.request.num_in_flight = 0
            self.cache.free(step.released)
        self._in_flight.clear()
        for request in self.unfinished:
            self.abort(request)

    def expire(self, now: float) -> list[Request]:
        """End every request whose deadline is before ``now`` (time.monotonic) and return them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] < now:
            request = heapq.heappop(self._deadlines)[2]
            if request.finish_reason is None:
                self.abort(request, "deadline")
                expired.append(request)
        return expired

    def schedule(self) -> StepInput | None:
        """Choose and advance the next step; None where nothing can run (before another step is committed)."""
        assert self.limits.max_tokens is not None
        step = _ScheduledStep(self.limits.max_tokens)
        if self.limits.mixed_phases:
            self._continue(step, self._running)
            self._admit(step)
        else:
            self._schedule_one_phase(step)
        if not step.shares:
            return None
        if step.budget != self.limits.max_tokens - len(step.shares):  # not all are decodes
            step.shares.sort(key=lambda share: share.scheduled.count > 1)
        for share in step.shares:
            share.request.num_in_flight += 1
        self._in_flight.append(step)
        freed, self._freed_slots = tuple(self._freed_slots), []
        self._number += 1
        scheduled, copies = tuple(share.scheduled for share in step.shares), tuple(sorted(step.copies))
        return StepInput(self._number, freed, tuple(step.new), scheduled, copies)

    def hash_prompts(self) -> None:
        """Hash the blocks of prompts that steps in flight fill, which committing them needs: while the device works."""
        if not self._prefix_caching:
            return
        size = self.cache.geometry.block_size
        for step in self._in_flight:
            for share in reversed(step.shares):  # decodes come first
                if share.scheduled.count == 1:
                    break
                if not share.scheduled.drafts:
                    end = share.scheduled.start + share.scheduled.count
                    deque(share.request.block_hashes(size, end // size), maxlen=0)

    def commit(self, output: StepOutput) -> list[Request]:
        """Take the tokens of the oldest step in flight; returns the requests that got some, finished ones included."""
        step = self._in_flight.popleft()
        self.num_drawn += sum(map(len, output.tokens))
        drawn = zip_longest(output.tokens, output.logprobs, output.drafts, fillvalue=None)
        advanced = []
        for share in step.shares:
            request, scheduled = share.request, share.scheduled
            request.num_in_flight -= 1
            if not scheduled.samples:
                if request.finish_reason is None:
                    self._remember(share, len(request.token_ids))
                continue
            tokens, scores, drafts = next(drawn)
            assert tokens is not None, "a step draws tokens for each request that samples"
            if scheduled.drafts:
                self._settle(share, len(tokens))
            request.num_proposed = len(drafts or ())
            if request.finish_reason is not None:
                self.num_drawn -= len(tokens)
                continue
            known = len(request.token_ids)
            request.token_ids += tokens
            if scores is not None:
                request.logprobs += scores
            if request.structure is None and request.asked.stop_token_ids.isdisjoint(tokens):
                # Drafts are so few that no token beyond the longest output can be drawn.
                longest = request.asked.max_total_tokens
                ended: FinishReason | None = "length" if len(request.token_ids) >= longest else None
            else:
                ended = self._end_among(request, tokens)
            self._remember(share, known)
            advanced.append(request)
            if ended is not None:
                self._end(request, ended)
            elif drafts is not None:
                request.drafts = drafts if request.slot is not None else ()
        assert next(drawn, None) is None, "a step draws tokens for each request that samples"
        for chunk in output.prompt_logprobs:
            step.shares[chunk.index].request.take_prompt_logprobs(chunk)
        self.cache.free(step.released)
        return advanced

    def _settle(self, share: _Share, num_drawn: int) -> None:
        """Take back what a step advanced by drafts that were wrong."""
        request, drafts = share.request, share.scheduled.drafts
        wrong = len(drafts) + 1 - num_drawn
        if request.finish_reason is None:
            given = len(drafts)
            self.num_drafted += min(request.num_proposed, given) if drafts[0] == DRAFTED_AHEAD else given
            self.num_accepted += num_drawn - 1
        request.num_unsettled -= len(drafts)
        request.num_sampled -= wrong
        if request.held is not None:  # else it was preempted, and begins again
            request.num_computed -= wrong

    def _end_among(self, request: Request, tokens: Sequence[int]) -> FinishReason | None:
        """Why ``request`` ends with one of ``tokens``, its newest, of which it loses those behind. None: it goes on."""
        for number, token in enumerate(tokens, 1):
            ended: FinishReason | None = None
            if token in request.asked.stop_token_ids:
                ended, request.stop_reason = "stop", token
            elif request.structure is not None:
                request.structure.accept(token)
                ended = self._end_of_structure(request, request.structure)
            if ended is not None:
                self._drop(request, len(tokens) - number)
                return ended
        return "length" if len(request.token_ids) >= request.asked.max_total_tokens else None

    def _drop(self, request: Request, count: int) -> None:
        """Forget the last ``count`` tokens of ``request``."""
        self.num_drawn -= count
        if count:
            del request.token_ids[-count:]
            del request.logprobs[len(request.token_ids) - request.num_prompt_tokens :]

    def _schedule_one_phase(self, step: _ScheduledStep) -> None:
        """Prompts before decodes, except where a decode was promised the pages of a preempted request."""
        if self._promised is not None and self._promised.num_to_compute == 1:
            self._continue(step, [r for r in self._running if r.num_to_compute == 1])
        if not step.shares:
            self._continue(step, [r for r in self._running if r.num_to_compute > 1])
            self._admit(step)
        if not step.shares:
            self._continue(step, self._running)

    def _continue(self, step: _ScheduledStep, requests: list[Request]) -> None:
        """Give running requests their tokens, in order: decodes, and prompts that are partly read."""
        step.looked_at = tuple(requests)
        if self._num_drafts:
            self._owe(step, requests)
        for request in step.looked_at:
            if self._num_drafts:
                step.owed_tokens -= request.num_to_compute > 0
                step.owed_pages -= self._pages_of_next(request)
            if step.budget and request.slot is not None:
                self._schedule(step, request, self._count(step, request))

    def _owe(self, step: _ScheduledStep, requests: list[Request]) -> None:
        """Keep a token for each of ``requests``, with its page, and some tokens for one that waits, from drafts."""
        step.owed_tokens = sum(request.num_to_compute > 0 for request in requests)
        step.owed_pages = sum(map(self._pages_of_next, requests))
        if self._waiting and self._free_slots:
            step.owed_tokens += self.limits.chunk_multiple

    def _pages_of_next(self, request: Request) -> int:
        """Pages that the next token of ``request`` needs; 0 where it has been preempted."""
        if request.held is None or not request.num_to_compute:
            return 0
        return self._num_fresh(request, request.held, request.num_computed + 1)

    def _num_fresh(self, request: Request, held: HeldPages, end: int) -> int:
        """Fresh pages that ``request`` needs for its next tokens, up to position ``end``."""
        return self.cache.num_fresh(held.num_blocks, request.num_computed, end, request.num_unsettled == 0)

    def _admit(self, step: _ScheduledStep) -> None:
        """Start waiting requests, as long as slots, tokens and pages last. A step that preempted starts none."""
        step.looked_at = ()
        partial = self._partial_prompts() if self._waiting.first_long else []
        while self._waiting and step.budget and self._free_slots and not step.preempted and not self._promised:
            request = self._first_waiting(partial)
            if request is None or request.num_in_flight:
                break  # preempted a moment ago: not all of its tokens are known yet
            prefix = self._cached_prefix(request)
            request.num_computed = prefix.num_blocks * self.cache.geometry.block_size
            start = request.num_computed
            count = self._count(step, request)
            need = self.cache.num_fresh(prefix.num_blocks, start, start + count)
            if count == 0 or self.cache.pool.num_free_without(prefix.found()) < need:
                request.num_computed = 0
                break
            self._waiting.take(request)
            request.slot, request.held = self._free_slots.pop(), self.cache.start(prefix)
            request.started = request.started or time.monotonic()
            if not (request.num_preemptions or request.num_sampled):  # a later start finds what it stored itself
                request.num_cached_tokens = request.num_computed
                self.num_cached_tokens += request.num_computed
            bisect.insort(self._running, request, key=lambda r: r.precedence)
            sampling, num_prompt, adapter = request.slot_sampling, request.num_prompt_tokens, request.adapter.slot
            step.new.append(NewRequest(request.slot, request.known_ids, sampling, num_prompt, adapter))
            self._schedule(step, request, count, prefix)
            if self._prefill.is_long(request.num_to_compute):
                partial.append(request.asked.priority)

    def _first_waiting(self, partial: Sequence[int]) -> Request | None:
        """The first waiting request that may start while long prompts of the priorities ``partial`` are read."""
        short, long = self._waiting.first_short, self._waiting.first_long
        if long is None or (short is not None and short.precedence < long.precedence):
            return short
        return long if self._prefill.num_startable(long.asked.priority, partial) else short

    def _partial_prompts(self) -> list[int]:
        """The priorities of running requests whose prompts are long."""
        is_long = self._prefill.is_long
        return [request.asked.priority for request in self._running if is_long(request.num_to_compute)]

    def _room(self, step: _ScheduledStep, request: Request) -> int:
        """The most tokens of ``step`` that ``request`` may take."""
        if not self._prefill.is_long(request.num_to_compute):
            return step.budget
        behind = bisect.bisect_right(step.looked_at, request.precedence, key=lambda r: r.precedence)
        running = ((r.asked.priority, r.num_to_compute) for r in step.looked_at[behind:] if r.slot is not None)
        others = itertools.chain(self._startable(request), running)  # more important ones first
        return self._prefill.room(request.asked.priority, step.budget, others)

    def _startable(self, request: Request) -> Iterator[tuple[int, int]]:
        """The waiting requests, beside ``request``, for which slots and pages last: their priorities, and the tokens
        that each wants. None while pages are promised, since none starts then."""
        if self._promised is not None:
            return
        slots, free = len(self._free_slots), self.cache.pool.num_free
        num_long = 0
        if long := self._waiting.first_long:
            num_long = self._prefill.num_startable(long.asked.priority, self._partial_prompts())
        for other in self._waiting.ordered(num_long):
            if other is request:
                continue
            if not slots or other.num_in_flight:
                return
            prefix = self._cached_prefix(other)
            start = prefix.num_blocks * self.cache.geometry.block_size
            wanted = other.num_to_compute - start
            held = sum(self.cache.pool.is_free(page) for page in prefix.found())
            slots -= 1
            free -= held + self.cache.num_fresh(prefix.num_blocks, start, start + min(wanted, self._prefill.guarantee))
            if free < 0:
                return
            yield other.asked.priority, wanted

    def _cached_prefix(self, request: Request) -> Prefix:
        """The cached start of ``request``; at least its last token is left to compute."""
        if not self._prefix_caching or request.asked.needs_all_logits:
            return Prefix()
        size = self.cache.geometry.block_size
        return self.cache.find(request.block_hashes(size, (request.num_tokens - 1) // size))

    def _remember(self, share: _Share, known: int) -> None:
        """Let later requests find the blocks that a step has filled with tokens that stay; ``known`` counts the tokens
        that its request had before."""
        request, size = share.request, self.cache.geometry.block_size
        if not self._prefix_caching or request.held is None:
            return
        start = share.scheduled.start
        stored = start + share.scheduled.count
        if share.scheduled.drafts or share.scheduled.slack:  # behind drafts that were right nothing stays
            start, stored = min(start, known - 1), min(stored, len(request.token_ids) - 1)
        first, end = start // size, stored // size
        if end > first:
            self.cache.remember(request.held, first, list(request.block_hashes(size, end)), stored)

    def _count(self, step: _ScheduledStep, request: Request) -> int:
        """How many of the tokens of ``request`` the step takes."""
        start, wanted = request.num_computed, request.num_to_compute
        if wanted <= 1:
            return min(wanted, step.budget)
        multiple, room = self.limits.chunk_multiple, self._room(step, request)
        count = wanted if wanted <= room else room - room % multiple
        to_edge = self.cache.to_edge(start, count)
        return count if to_edge % multiple else to_edge

    def _schedule(self, step: _ScheduledStep, request: Request, count: int, prefix: Prefix | None = None) -> None:
        """Advance ``request`` by ``count`` tokens, unless it has to give way for want of a page.

        ``prefix`` is the one it starts from, if it starts now.
        """
        start, wanted = request.num_computed, request.num_to_compute
        if count == 0:
            return
        assert request.slot is not None
        assert request.held is not None
        drafts: tuple[int, ...] = ()
        allowed: tuple[bytes, ...] = ()
        samples = count == wanted
        if samples and (request.drafts or request.structure is not None or self._num_drafts_ahead):
            drafts, allowed = self._drafts(step, request, count)
            count += len(drafts)
        slack = request.num_unsettled
        if unread := self.cache.take_back(request.held, start - slack):
            self._release(request, unread)
        grown = self.cache.no_growth
        if start + count > request.held.num_blocks * self.cache.geometry.block_size:
            found = self._grow(step, request, request.held, start + count)
            if found is None:
                return
            grown = found
        if self._promised is request:
            self._promised = None
        request.num_computed += count
        request.num_sampled += samples
        if drafts:
            request.num_sampled += len(drafts)
            request.num_unsettled += len(drafts)
        if grown.copies:
            step.copies += grown.copies
        pages = tuple(map(tuple, request.held.pages)) if prefix else grown.pages
        scheduled = ScheduledRequest(request.slot, start, count, pages, samples, allowed, drafts, slack)
        step.shares.append(_Share(request, scheduled))
        if allowed or (samples and self._waits_for_drafts):
            step.needs_values = True
        step.budget -= count

    def _grow(self, step: _ScheduledStep, request: Request, held: HeldPages, end: int) -> Growth | None:
        """Pages for ``request`` up to position ``end``, of preempted requests where needed; None: it has to wait."""
        start = request.num_computed
        need = self._num_fresh(request, held, end)
        if need and self._promised is not None and self._promised.precedence < request.precedence:
            return None  # what is free, or comes free, is the other's
        while (grown := self.cache.grow(held, start, end, request.num_unsettled == 0)) is None:
            returning = (page for submitted in self._in_flight for page in submitted.released)
            if self.cache.pool.num_free + self.cache.pool.num_freed_by(returning) >= need:
                self._promised = request
                return None
            victim = self._running[-1]
            step.preempted = True
            self._preempt(victim)
            if victim is request:
                return None
        return grown

    def _drafts(self, step: _ScheduledStep, request: Request, count: int) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """The drafts that a step with ``count`` other tokens of ``request`` verifies, and what each draw may give.

        There are none for which another request would have to give way, or that nothing could follow.
        """
        if request.num_tokens > len(request.token_ids):  # the step in flight proposes them
            drafts = (DRAFTED_AHEAD,) * self._num_drafts_ahead
        else:
            drafts, request.drafts = request.drafts, ()
        if drafts:
            assert request.held is not None
            room = min(step.budget - count - step.owed_tokens, request.asked.max_total_tokens - request.num_tokens - 1)
            drafts = drafts[: max(0, room)]
            need = self._num_fresh(request, request.held, request.num_computed + count + len(drafts))
            if need and (self._promised is not None or self.cache.pool.num_free < need + step.owed_pages):
                drafts = ()
        allowed = request.next_allowed(drafts)
        return drafts[: len(allowed) - 1] if allowed else drafts, allowed

    def _release(self, request: Request, pages: list[int]) -> None:
        """Give up ``pages`` of ``request``: now, or when the steps in flight that may use them are done."""
        if request.num_in_flight:
            self._in_flight[-1].released += pages
        else:
            self.cache.free(pages)

    def _preempt(self, request: Request) -> None:
        """Take the pages of ``request``; it waits, by its precedence, to be computed again from its tokens."""
        self._stop_running(request)
        request.num_computed, request.drafts = 0, ()
        request.num_preemptions += 1
        self._waiting.add(request, is_long=False)  # it has waited for other prompts before

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.slot is None:
            self._waiting.drop()
        else:
            self._stop_running(request)

    def _end_of_structure(self, request: Request, structure: StructureState) -> FinishReason | None:
        """Why nothing can follow: all is said, or the grammar has come to a dead end, which is the request's error."""
        if structure.error is not None:
            request.error = RequestError(f"structured output: no token can follow any more: {structure.error}")
            return "abort"
        return "stop" if structure.is_complete else None

    def _stop_running(self, request: Request) -> None:
        """Give up slot and pages; pages that a step in flight still uses are freed when it is done."""
        assert request.slot is not None
        assert request.held is not None
        if self._promised is request:
            self._promised = None
        self._running.remove(request)
        self._release(request, request.held.held())
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot, request.held, request.last_held = None, None, request.held
