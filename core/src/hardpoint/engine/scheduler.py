"""The scheduler: who runs in the next step, with how many tokens, on which pages.

It never needs a token's value: ``schedule`` advances counts and pages as it submits, ``commit`` takes the values when
they arrive. First come, first served; a request that finds no page preempts the newest running one, which is computed
again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hardpoint.engine.block_pool import BlockPool
from hardpoint.engine.request import Request
from hardpoint.engine.step import NewRequest, ScheduledRequest, SlotSampling, StepInput, StepOutput
from hardpoint_plugin_api import CapacityError, StepLimits


@dataclass(frozen=True)
class SchedulerArgs:
    """What a scheduler is constructed with. ``limits`` has its maxima set."""

    pool: BlockPool
    limits: StepLimits
    max_model_len: int


@dataclass
class _Step:
    """A step being put together."""

    budget: int
    shares: list[tuple[Request, ScheduledRequest]] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """Holds every unfinished request. ``schedule`` -> submit -> ``commit``, in the order of the steps."""

    def __init__(self, args: SchedulerArgs) -> None:
        self.pool, self.limits, self.max_model_len = args.pool, args.limits, args.max_model_len
        assert self.limits.max_tokens is not None
        assert self.limits.max_requests is not None
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(range(self.limits.max_requests - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._in_flight: deque[list[Request]] = deque()
        self._number = 0

    @property
    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue ``request``. Raises CapacityError if even the empty pool could not hold all its tokens."""
        need = self.pool.pages_for(request.max_total_tokens)
        if need > self.pool.num_usable:
            raise CapacityError(
                f"request {request.request_id} may reach {request.max_total_tokens} tokens, the cache holds "
                f"{self.pool.num_usable * self.pool.block_size}; raise --kv-cache-memory, or lower max_tokens"
            )
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End ``request`` now; unknown or finished ones are left alone."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.finish_reason = "abort"
        elif request in self._running:
            self._finish(request)
            request.finish_reason = "abort"

    def schedule(self) -> StepInput | None:
        """Choose and advance the next step; None where nothing can run."""
        assert self.limits.max_tokens is not None
        step = _Step(self.limits.max_tokens)
        if self.limits.mixed_phases:
            self._continue(step, list(self._running))
            self._admit(step)
        else:
            self._continue(step, [r for r in self._running if r.num_to_compute > 1])
            self._admit(step)
            if not step.shares:
                self._continue(step, list(self._running))
        if not step.shares:
            return None
        step.shares.sort(key=lambda share: share[1].count > 1)
        self._in_flight.append([request for request, share in step.shares if share.samples])
        freed, self._freed_slots = tuple(self._freed_slots), []
        self._number += 1
        return StepInput(self._number, freed, tuple(step.new), tuple(share for _, share in step.shares))

    def _continue(self, step: _Step, requests: list[Request]) -> None:
        """Give running requests their tokens, the oldest first: decodes, and prompts that are partly read."""
        for request in requests:
            if step.budget and request in self._running:
                self._schedule(step, request)

    def _admit(self, step: _Step) -> None:
        """Start waiting requests, as long as slots, tokens and pages last. A step that preempted starts none."""
        while self._waiting and step.budget and self._free_slots and not step.preempted:
            request = self._waiting[0]
            count = self._count(step, request)
            if count == 0 or self.pool.num_free < self.pool.pages_for(count):
                break
            self._waiting.popleft()
            request.slot = self._free_slots.pop()
            self._running.append(request)
            step.new.append(NewRequest(request.slot, tuple(request.token_ids), _sampling(request)))
            self._schedule(step, request)

    def commit(self, output: StepOutput) -> list[Request]:
        """Take the tokens of the oldest step in flight; returns the requests that got one, finished ones included."""
        requests = self._in_flight.popleft()
        assert len(requests) == len(output.tokens)
        advanced = []
        for request, token in zip(requests, output.tokens, strict=True):
            if request.finish_reason:
                continue
            request.token_ids.append(token)
            advanced.append(request)
            if token in request.stop_token_ids:
                request.finish_reason, request.stop_reason = "stop", token
            elif len(request.token_ids) >= request.max_total_tokens:
                request.finish_reason = "length"
            if request.finish_reason and request in self._running:
                self._finish(request)
        return advanced

    def _count(self, step: _Step, request: Request) -> int:
        """How many tokens of ``request`` the step has room for."""
        count = min(request.num_to_compute, step.budget)
        return count if count == request.num_to_compute else count - count % self.limits.chunk_multiple

    def _schedule(self, step: _Step, request: Request) -> None:
        """Advance ``request`` by as many tokens as there is room for, unless it has to give way for want of a page."""
        count = self._count(step, request)
        if count == 0:
            return
        need = max(0, self.pool.pages_for(request.num_computed + count) - len(request.pages))
        while (pages := self.pool.allocate(need)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            step.preempted = True
            if victim is request:
                return
        start = request.num_computed
        request.pages += pages
        request.num_computed += count
        samples = request.num_to_compute == 0
        request.num_sampled += samples
        assert request.slot is not None
        step.shares.append((request, ScheduledRequest(request.slot, start, count, tuple(pages), samples)))
        step.budget -= count

    def _preempt(self, request: Request) -> None:
        """Take the pages of ``request``; it waits at the front, to be computed again from its tokens."""
        self._finish(request)
        request.num_computed, request.pages, request.slot = 0, [], None
        request.num_sampled = len(request.token_ids) - len(request.prompt_token_ids)
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        self._running.remove(request)
        self.pool.free(request.pages)
        request.pages = []
        assert request.slot is not None
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)


def _sampling(request: Request) -> SlotSampling:
    p = request.params
    return SlotSampling(p.temperature, max(0, p.top_k), p.top_p, p.min_p, request.seed)
