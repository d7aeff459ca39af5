"""The scheduler and the pool alone, over random streams of requests."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.scheduling.prefill_policy import PrefillPolicy
from hardpoint.engine.scheduling.step import StepOutput
from hardpoint_plugin_api import Latest, Retention, Span, StepLimits
from tests.engine.scheduling import (
    MOST_DRAFTS,
    Device,
    Drafter,
    drafting,
    expected_output,
    make_request,
    make_scheduler,
    submit_ahead,
)

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
