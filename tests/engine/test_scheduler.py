"""The scheduler and the pool alone: order, prefixes, deadlines, drafts, and pages of windows."""

from __future__ import annotations

import math
import time
from collections import deque

import pytest

from hardpoint.engine.scheduling.block_pool import BlockPool, hash_block, hash_salt
from hardpoint.engine.scheduling.paged_cache import CacheGeometry, PagedCache
from hardpoint.engine.scheduling.step import StepOutput
from hardpoint_plugin_api import NULL_PAGE, CapacityError, Span, StepLimits
from tests.engine.scheduling import (
    BLOCK,
    END,
    Device,
    drafting,
    expected_output,
    make_request,
    make_scheduler,
    run,
    submit_ahead,
)


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
