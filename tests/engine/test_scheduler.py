"""The scheduler and the pool alone, over random streams of requests, against a device that remembers what it stored.

The device executes steps from their deltas alone, as a runner does. It checks that the cache holds just the tokens that
a request builds on, whoever stored them, and draws tokens by a rule that depends on all of them: so a request's output
is right only if nothing was lost, shared wrongly, overwritten too early or computed twice.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.requests import AdmittedRequest
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.block_pool import BlockPool, hash_block, hash_salt
from hardpoint.engine.scheduling.paged_cache import CacheGeometry, PagedCache
from hardpoint.engine.scheduling.prefill_policy import PrefillPolicy
from hardpoint.engine.scheduling.request import Request
from hardpoint.engine.scheduling.scheduler import Scheduler, SchedulerArgs
from hardpoint.engine.scheduling.step import DRAFTED_AHEAD, StepInput, StepOutput
from hardpoint_plugin_api import NO_DRAFT, NULL_PAGE, CapacityError, Latest, Retention, Span, StepLimits

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


PROMPTS = st.one_of(
    st.integers(1, 30).map(lambda length: list(range(length))),  # these share prefixes
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
)


FULL, WINDOW, CHUNK = Span(), Span(window=6), Span(chunk=8)
SPANS: list[tuple[Retention, ...]] = [
    (FULL,),
    (WINDOW,),
    (CHUNK,),
    (FULL, WINDOW),
    (WINDOW, WINDOW, FULL),
    (CHUNK, FULL),
    (WINDOW, CHUNK),
]
SPANS += [(Latest(),), (Latest(), FULL), (WINDOW, Latest(), Latest())]


STREAMS = given(
    requests=st.lists(
        st.tuples(PROMPTS, st.integers(1, 20), st.integers(0, 30), st.booleans(), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=20,
    ),
    pages=st.integers(14, 40),
    max_tokens=st.integers(4, 40),
    max_requests=st.integers(1, 8),
    chunk=st.sampled_from([1, 2, 3, 4]),
    mixed=st.booleans(),
    depth=st.integers(0, 2),
    caching=st.booleans(),
    spans=st.sampled_from(SPANS),
    aborts=st.dictionaries(st.integers(0, 40), st.integers(0, 19), max_size=5),
    ahead=st.booleans(),
    threshold=st.none() | st.integers(0, 10),
    max_partial=st.integers(1, 3),
    drafter=st.none()
    | st.builds(drafting, st.integers(1, MOST_DRAFTS), st.sampled_from([0, 0.2, 0.7, 1]), st.integers(0, 99)),
)


def check_random_streams(
    requests: list[tuple[list[int], int, int, bool, int, bool]],
    pages: int,
    max_tokens: int,
    max_requests: int,
    chunk: int,
    mixed: bool,
    depth: int,
    caching: bool,
    spans: tuple[Retention, ...],
    aborts: dict[int, int],
    ahead: bool,
    threshold: int | None,
    max_partial: int,
    drafter: Drafter | None,
) -> None:
    pages *= len(spans)
    mixed |= drafter is not None
    limits = StepLimits(max_tokens=max_tokens, max_requests=max_requests, chunk_multiple=chunk, mixed_phases=mixed)
    prefill = PrefillPolicy.within(limits, threshold, max_partial)
    num_drafts = MOST_DRAFTS if drafter else 0
    scheduler = make_scheduler(pages, limits, caching, spans, num_drafts, drafts_ahead=ahead, prefill=prefill)
    device = Device(limits, pages, spans, drafter)
    everybody = [
        make_request(i, prompt, output, may_stop=may_stop, priority=priority, cache_salt="a" if salted else "")
        for i, (prompt, output, _, may_stop, priority, salted) in enumerate(requests)
    ]
    arrivals = deque(sorted((request[2], i) for i, request in enumerate(requests)))
    submitted: deque[StepOutput] = deque()
    for tick in range(10_000):
        while arrivals and arrivals[0][0] <= tick:
            scheduler.add(everybody[arrivals.popleft()[1]])
        started = [request for request in everybody if all(request is not everybody[i] for _, i in arrivals)]
        if tick in aborts and aborts[tick] < len(started):
            scheduler.abort(started[aborts[tick]])
        submit_ahead(scheduler, device, submitted, depth)
        if submitted:
            scheduler.commit(submitted.popleft())
        elif not arrivals:
            break
        else:
            assert not scheduler.has_unfinished, "work is left and nothing runs"
    else:
        pytest.fail("requests do not end")
    assert not scheduler.has_unfinished
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable, "pages leaked"
    for request in everybody:
        got, wanted = request.output_token_ids, expected_output(request)
        if request.finish_reason == "abort":
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
            assert request.finish_reason == ("stop" if wanted[-1] in request.asked.stop_token_ids else "length")


def test_a_long_prompt_takes_the_pages_that_it_was_promised_before_a_more_important_one_comes() -> None:
    """Which may not start before, so that the long one must not leave the whole step to it."""
    requests: list[tuple[list[int], int, int, bool, int, bool]] = [
        *[([0], 1, 15, False, 0, False)] * 2,
        ([0], 2, 21, False, 0, False),
        ([0], 5, 15, False, 0, False),
        ([0], 12, 6, False, 0, False),
        ([0], 17, 7, False, 2, False),
        (list(range(12)), 1, 26, False, 0, False),
        (list(range(14)), 1, 21, False, 1, False),
        (list(range(25)), 1, 21, False, 0, False),
        ([0, 0, 0], 11, 13, False, 0, False),
    ]
    check_random_streams(requests, 14, 12, 5, 1, True, 2, False, (WINDOW,), {}, False, None, 1, None)


def test_states_are_left_behind_only_where_drafts_are_verified() -> None:
    """A step ahead is planned from where the last one ends with the most drafts, at the edge of a block; it ends before
    that edge, since fewer were proposed."""
    requests = [([0], 16, 0, False, 0, False)]
    drafter = drafting(1, 0, 0)
    check_random_streams(requests, 14, 7, 1, 1, False, 2, True, (Latest(),), {}, True, None, 1, drafter)


@settings(max_examples=200, deadline=None)
@STREAMS
def test_random_streams(**stream: Any) -> None:
    check_random_streams(**stream)


@pytest.mark.nightly
@settings(max_examples=40_000, deadline=None)
@STREAMS
def test_many_random_streams(**stream: Any) -> None:
    check_random_streams(**stream)


@pytest.mark.parametrize("depth", [0, 1])
def test_lower_priority_values_first_then_first_come(depth: int) -> None:
    limits = StepLimits(max_tokens=8, max_requests=1)
    scheduler, device = make_scheduler(40, limits), Device(limits, 40)
    requests = [make_request(i, [i] * 6, 3, priority=priority) for i, priority in enumerate([1, 0, 1, 0])]
    for request in requests:
        scheduler.add(request)
    ended: list[int] = []
    submitted: deque[StepOutput] = deque()
    while scheduler.has_unfinished:
        submit_ahead(scheduler, device, submitted, depth)
        ended += [r.number for r in scheduler.commit(submitted.popleft()) if r.finish_reason]
    assert ended == [1, 3, 0, 2]


def test_a_common_prefix_is_computed_once() -> None:
    limits = StepLimits(max_tokens=100, max_requests=4)
    scheduler, device = make_scheduler(40, limits), Device(limits, 40)
    prompt = list(range(22))
    for number in range(3):
        scheduler.add(make_request(number, prompt, 1))
        run(scheduler, device, depth=0)
    assert device.num_computed == 22 + 2 + 2, "five blocks of four are found again, two tokens are not"
    scheduler.add(stranger := make_request(3, prompt, 1, cache_salt="another tenant"))
    run(scheduler, device, depth=0)
    assert device.num_computed == 22 + 2 + 2 + 22
    assert stranger.num_cached_tokens == 0


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    limits = StepLimits(max_tokens=100, max_requests=4)
    scheduler, device = make_scheduler(40, limits), Device(limits, 40)
    for number in range(2):
        scheduler.add(make_request(number, list(range(8)), 1))
        run(scheduler, device, depth=0)
    assert device.num_computed == 8 + 4


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    limits = StepLimits(max_tokens=64, max_requests=4)
    scheduler, device = make_scheduler(10, limits), Device(limits, 10)
    requests = [make_request(i, [i + 2] * 14, 18) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, device, depth=1)
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(request.output_token_ids == expected_output(request) for request in requests)
    assert scheduler.num_cached_tokens == sum(request.num_cached_tokens for request in requests) == 0, "nobody else's"


def test_deadlines_end_requests_wherever_they_are() -> None:
    limits = StepLimits(max_tokens=8, max_requests=1)
    scheduler, device = make_scheduler(40, limits), Device(limits, 40)
    now = time.monotonic()
    running, waiting, patient = (
        make_request(i, [i] * 6, 9, deadline=deadline) for i, deadline in enumerate([now + 1, now + 2, None])
    )
    for request in (running, waiting, patient):
        scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    output = device.execute(step)
    assert scheduler.expire(now) == []
    assert scheduler.expire(now + 3) == [running, waiting]
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert running.stop_reason == "deadline"
    scheduler.commit(output)
    run(scheduler, device, depth=1)
    assert patient.output_token_ids == expected_output(patient)
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable


def test_requests_that_end_before_their_deadlines_are_let_go() -> None:
    limits = StepLimits(max_tokens=8, max_requests=1)
    scheduler, device = make_scheduler(100, limits), Device(limits, 100)
    now = time.monotonic()
    scheduler.add(late := make_request(0, [1] * 6, 300, deadline=now + 1))
    for number in range(1, 300):
        scheduler.add(make_request(number, [1] * 3, 1, deadline=now + 3600, priority=-1))
        while scheduler.num_running + scheduler.num_waiting > 1:
            step = scheduler.schedule()
            assert step is not None
            scheduler.commit(device.execute(step))
    assert len(scheduler._deadlines) < 80
    scheduler.add(patient := make_request(300, [1] * 3, 1, deadline=math.inf))
    assert patient not in [request for _, _, request in scheduler._deadlines]
    assert scheduler.expire(now + 2) == [late], "one that is still there keeps its deadline"


@pytest.mark.parametrize(("wrong", "steps"), [(0, 1 + 4), (1, 20)])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(wrong: float, steps: int) -> None:
    limits = StepLimits(max_tokens=64, max_requests=2)
    scheduler, device = make_scheduler(40, limits, num_drafts=4), Device(limits, 40, drafter=drafting(4, wrong))
    scheduler.add(request := make_request(0, [3] * 6, 20))
    taken = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        assert scheduler.needs_values
        taken += 1
        scheduler.commit(device.execute(step))
    assert request.output_token_ids == expected_output(request)
    assert taken == steps
    assert scheduler.num_drawn == 20
    assert (scheduler.num_drafted > 0) == (steps > 1)
    assert scheduler.num_accepted == (0 if wrong else 15)
    assert not scheduler.cache.find(request.block_hashes(BLOCK, 6)).num_blocks < 6, (
        "blocks of accepted drafts are known"
    )


def test_a_stop_token_among_right_drafts_drops_what_follows() -> None:
    limits = StepLimits(max_tokens=64, max_requests=2)
    stopped = [
        request for n in range(40) if expected_output(request := make_request(0, [n] * 3, 30, may_stop=True))[-1] == END
    ]
    for request in stopped:
        scheduler, device = make_scheduler(40, limits, num_drafts=4), Device(limits, 40, drafter=drafting(9, 0))
        scheduler.add(request)
        run(scheduler, device, depth=1)
        assert request.output_token_ids == expected_output(request)
        assert request.stop_reason == END
    assert len(stopped) > 5


def test_drafts_take_no_page_that_another_request_would_have_to_give() -> None:
    limits = StepLimits(max_tokens=64, max_requests=4)
    scheduler, device = make_scheduler(9, limits, num_drafts=6), Device(limits, 9, drafter=drafting(6, 1))
    requests = [make_request(i, [i + 2] * 3, 12) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, device, depth=0)
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert all(request.output_token_ids == expected_output(request) for request in requests)


def test_drafts_take_no_page_that_a_later_request_needs_in_the_same_step() -> None:
    limits = StepLimits(max_tokens=64, max_requests=8)
    scheduler, device = make_scheduler(4, limits, num_drafts=4), Device(limits, 4, drafter=drafting(4, 1))
    requests = [make_request(0, [2] * 3, 6), make_request(1, [3] * 4, 5)]
    for request in requests:
        scheduler.add(request)
    for _ in range(2):
        step = scheduler.schedule()
        assert step is not None
        assert len(step.scheduled) == 2
        scheduler.commit(device.execute(step))
    assert [request.num_preemptions for request in requests] == [0, 0]


def test_right_drafts_count_as_right_after_preemption() -> None:
    """Drafts that a step in flight verifies while its request loses its pages."""
    limits, pages = StepLimits(max_tokens=64, max_requests=6), 8
    scheduler = make_scheduler(pages, limits, num_drafts=2, drafts_ahead=True)
    requests = [make_request(i, [i + 2] * 3, 25) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, Device(limits, pages, drafter=drafting(2, 0)), depth=1)
    assert sum(request.num_preemptions for request in requests) > 0
    assert scheduler.num_accepted == scheduler.num_drafted > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_starve_no_request(ahead: bool) -> None:
    """Neither one that runs, nor one that waits: the budget is less than all drafts take."""
    limits = StepLimits(max_tokens=16, max_requests=12)
    scheduler = make_scheduler(400, limits, num_drafts=7, drafts_ahead=ahead)
    device = Device(limits, 400, drafter=drafting(7, 1))
    requests = [make_request(i, [i + 2] * 3, 40) for i in range(9)]
    for request in requests[:8]:
        scheduler.add(request)
    for number in range(30):
        if number == 10:
            scheduler.add(requests[8])
        step = scheduler.schedule()
        assert step is not None
        scheduler.commit(device.execute(step))
    sampled = [request.num_sampled for request in requests]
    assert min(sampled[:8]) >= 20
    assert sampled[8] >= 8


def test_a_request_larger_than_the_pool_is_refused_with_the_remedy() -> None:
    scheduler = make_scheduler(4, StepLimits(max_tokens=8, max_requests=2))
    with pytest.raises(CapacityError, match=r"may reach 13 tokens, the cache holds 12; raise --kv-cache-memory"):
        scheduler.add(make_request(0, [0] * 10, 3))
    assert not scheduler.has_unfinished


def test_the_pool_forgets_the_least_recently_used_and_tails_first() -> None:
    pool = BlockPool(6)
    cache = PagedCache(pool, CacheGeometry(BLOCK, (Span(),), 100))
    hashes = [hash_salt("")]
    for _ in range(4):
        hashes.append(hash_block(hashes[-1], [1, 2, 3, 4]))
    pages = pool.allocate(4)
    assert pages is not None
    for page, content in zip(pages, hashes[1:], strict=True):
        pool.remember(page, (0, content))
    pool.free(pages)
    assert cache.find(hashes[1:]).pages == [pages]
    assert pool.allocate(6) is None
    fresh = pool.allocate(2)
    assert fresh is not None
    assert cache.find(hashes[1:]).pages == [pages[:3]], "first the page without content went, then the end of the chain"
    pool.hold(pages[:1])
    assert pool.num_free == 2
    assert pool.num_free_without(pages[:3]) == 0


def test_prompts_are_hashed_while_the_device_works() -> None:
    """A search needs the first hash that is not in the cache, and no other; the rest is computed before the commit."""
    limits = StepLimits(max_tokens=100, max_requests=2)
    scheduler, device = make_scheduler(60, limits), Device(limits, 60)
    scheduler.add(request := make_request(0, list(range(30)), 2))
    step = scheduler.schedule()
    assert step is not None
    assert len(request._hashes) == 1
    scheduler.hash_prompts()
    assert len(request._hashes) == 30 // BLOCK
    scheduler.commit(device.execute(step))
    again = make_request(1, list(range(30)), 2)
    assert scheduler.cache.find(again.block_hashes(BLOCK, 30 // BLOCK)).num_blocks == 30 // BLOCK


def test_pages_behind_a_window_come_back_while_the_request_goes_on() -> None:
    limits = StepLimits(max_tokens=8, max_requests=2)
    spans = (Span(window=6),)
    scheduler, device = make_scheduler(6, limits, spans=spans), Device(limits, 6, spans)
    scheduler.add(request := make_request(0, [3] * 40, 60))
    run(scheduler, device, depth=1)
    assert request.output_token_ids == expected_output(request), "25 blocks passed through 5 pages"
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable


def test_a_prefix_is_found_where_the_window_still_has_its_end() -> None:
    limits, spans = StepLimits(max_tokens=100, max_requests=2), (Span(), Span(window=6))
    scheduler, device = make_scheduler(60, limits, spans=spans), Device(limits, 60, spans)
    prompt = list(range(30))
    scheduler.add(make_request(0, prompt, 1))
    run(scheduler, device, depth=0)
    cache = scheduler.cache
    request = make_request(1, prompt, 1)
    hashes = list(request.block_hashes(BLOCK, 7))
    found = cache.find(hashes)
    assert found.num_blocks == 7
    assert [page == NULL_PAGE for page in found.pages[1]] == [True] * 5 + [False] * 2, "two blocks reach back 6 tokens"
    lost = found.pages[1][-1]
    del cache.pool._page_of[cache.pool._hash_of.pop(lost)]
    assert cache.find(hashes).num_blocks == 6, "one block less"
    scheduler.add(request)
    run(scheduler, device, depth=0)
    assert request.num_cached_tokens == 24
    assert device.num_computed == 30 + 6


def test_geometry_counts_what_a_sequence_holds_at_once() -> None:
    geometry = CacheGeometry(BLOCK, (Span(), Span(window=6), Span(chunk=8)), max_step_tokens=8)
    assert [geometry.pages_for(n) for n in (1, 4, 5, 40)] == [3, 3, 6, 10 + 5 + 5]
    assert geometry.longest(20, 1000) == 40
    assert geometry.longest(2, 1000) == 0
    assert CacheGeometry(BLOCK, (Span(window=6),), 8).longest(5, 1000) == 1000, "a window never needs more"
