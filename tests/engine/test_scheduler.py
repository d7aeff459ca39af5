"""The scheduler alone, over random streams of requests: no page lost or shared, limits kept, everybody finishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.block_pool import BlockPool
from hardpoint.engine.request import Request
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduler import Scheduler, SchedulerArgs
from hardpoint.engine.step import StepInput, StepOutput
from hardpoint_plugin_api import CapacityError, StepLimits

BLOCK = 4


def make_request(name: int, prompt: int, output: int) -> Request:
    return Request(str(name), tuple(range(prompt)), SamplingParams(temperature=0), 0, frozenset({-1}), prompt + output)


def make_scheduler(pages: int, limits: StepLimits) -> Scheduler:
    return Scheduler(SchedulerArgs(BlockPool(pages, BLOCK), limits, max_model_len=1000))


class Observer:
    """What a runner would know, rebuilt from the deltas alone; asserts that they make sense."""

    def __init__(self, limits: StepLimits, pages: int) -> None:
        self.limits, self.num_pages = limits, pages
        self.pages: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}

    def see(self, step: StepInput) -> None:
        for slot in step.freed:
            self.pages.pop(slot, None)
        for new in step.new:
            assert new.slot not in self.pages, "a slot is taken twice"
            self.pages[new.slot], self.known[new.slot], self.computed[new.slot] = [], len(new.token_ids), 0
        assert 0 < step.num_tokens <= (self.limits.max_tokens or 0)
        assert len(self.pages) <= (self.limits.max_requests or 0)
        counts = [s.count for s in step.scheduled]
        assert counts == sorted(counts, key=lambda count: count > 1), "decodes come first"
        if not self.limits.mixed_phases:
            reading = [s for s in step.scheduled if self.computed[s.slot] + 1 < self.known[s.slot]]
            assert not reading or all(s.start + s.count <= self.known[s.slot] for s in step.scheduled)
        for share in step.scheduled:
            assert share.start == self.computed[share.slot], "tokens are computed once and in order"
            self.computed[share.slot] += share.count
            self.pages[share.slot] += share.new_pages
            assert len(self.pages[share.slot]) == -(-self.computed[share.slot] // BLOCK)
            left = self.known[share.slot] - self.computed[share.slot]
            assert share.samples == (left <= 0)
            if left > 0:
                assert share.count % self.limits.chunk_multiple == 0
            else:
                self.known[share.slot] = self.computed[share.slot] + 1
        held = [page for pages in self.pages.values() for page in pages]
        assert len(held) == len(set(held)), "a page has two owners"
        assert all(0 < page < self.num_pages for page in held), "the null page, or none of the pool, was given out"


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=25),
    pages=st.integers(14, 40),
    max_tokens=st.integers(4, 40),
    max_requests=st.integers(1, 8),
    chunk=st.sampled_from([1, 2, 4]),
    mixed=st.booleans(),
    aborts=st.sets(st.integers(0, 24), max_size=5),
)
def test_random_streams(
    requests: list[tuple[int, int, int]],
    pages: int,
    max_tokens: int,
    max_requests: int,
    chunk: int,
    mixed: bool,
    aborts: set[int],
) -> None:
    limits = StepLimits(max_tokens=max_tokens, max_requests=max_requests, chunk_multiple=chunk, mixed_phases=mixed)
    scheduler, observer = make_scheduler(pages, limits), Observer(limits, pages)
    arrivals = sorted((when, i, make_request(i, prompt, output)) for i, (prompt, output, when) in enumerate(requests))
    everybody = [request for _, _, request in arrivals]
    for tick in range(10_000):
        while arrivals and arrivals[0][0] <= tick:
            scheduler.add(arrivals.pop(0)[2])
        step = scheduler.schedule()
        if step is None:
            assert not scheduler.has_unfinished, "work is left and nothing runs"
            if not arrivals:
                break
            continue
        observer.see(step)
        if tick in aborts:
            scheduler.abort(everybody[tick % len(everybody)])
        scheduler.commit(StepOutput(step.number, tuple(7 for s in step.scheduled if s.samples)))
    else:
        pytest.fail("requests do not end")
    assert scheduler.pool.num_free == scheduler.pool.num_usable, "pages leaked"
    for request in everybody:
        assert request.finish_reason in ("length", "abort")
        if request.finish_reason == "length":
            assert len(request.token_ids) == request.max_total_tokens


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(40, StepLimits(max_tokens=8, max_requests=2))
    requests = [make_request(i, 6, 3) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    ended: list[str] = []
    while step := scheduler.schedule():
        done = scheduler.commit(StepOutput(step.number, tuple(7 for s in step.scheduled if s.samples)))
        ended += [r.request_id for r in done if r.finish_reason]
    assert ended == ["0", "1", "2", "3"]


def test_a_request_larger_than_the_pool_is_refused_with_the_remedy() -> None:
    scheduler = make_scheduler(4, StepLimits(max_tokens=8, max_requests=2))
    with pytest.raises(CapacityError, match=r"may reach 13 tokens, the cache holds 12; raise --kv-cache-memory"):
        scheduler.add(make_request(0, 10, 3))
    assert not scheduler.has_unfinished
