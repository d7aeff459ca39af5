"""The router of replicas: work is spread evenly, and prompts go where their beginning is cached."""

from __future__ import annotations

import random

from hardpoint.engine.remote.routing import CHUNK, OPEN_TOKENS, Router

KEY = ("", "")


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def test_short_requests_are_spread_evenly() -> None:
    router = Router([10_000] * 4)
    places = [router.place([1, 2, 3], KEY, range(4)) for _ in range(40)]
    assert [sum(place.replica == number for place in places) for number in range(4)] == [10] * 4


def test_a_long_prompt_counts_by_its_tokens() -> None:
    """As many short ones go elsewhere as it takes to outweigh it, until it has begun."""
    router = Router([0, 0])
    long = router.place(prompt(10 * OPEN_TOKENS, 0), KEY, range(2))
    others = [router.place([number], KEY, range(2)) for number in range(9)]
    assert {place.replica for place in others} == {1 - long.replica}
    router.begun(long)
    assert router.place([7], KEY, range(2)).replica == long.replica


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    router, shared = Router([10_000] * 3), prompt(8 * CHUNK, 1)
    first = router.place([*shared, 1], KEY, range(3))
    router.begun(first)
    again = router.place([*shared, 2], KEY, range(3))
    assert (again.replica, again.num_tokens) == (first.replica, 1)
    other_salt = router.place([*shared, 2], ("salt", ""), range(3))
    assert other_salt.replica != first.replica
    assert other_salt.num_tokens == len(shared) + 1


def test_a_cached_beginning_outweighs_only_so_many_requests() -> None:
    router, shared = Router([10_000] * 2), prompt(8 * CHUNK, 2)
    first = router.place(shared, KEY, range(2))
    router.begun(first)
    placed = [router.place(shared, KEY, range(2)) for _ in range(20)]
    for place in placed:
        router.begun(place)
    home = sum(place.replica == first.replica for place in placed)
    assert 8 * CHUNK // OPEN_TOKENS <= home < len(placed)


def test_what_ended_weighs_nothing_and_what_was_forgotten_attracts_nothing() -> None:
    router, shared = Router([10_000] * 2), prompt(4 * CHUNK, 3)
    first = router.place(shared, KEY, range(2))
    router.begun(first)
    router.ended(first)
    router.forget(first.replica)
    assert router.place(shared, KEY, range(2)).num_tokens == len(shared)


def test_beginnings_that_the_cache_no_longer_holds_are_forgotten_last_chunks_first() -> None:
    router, old = Router([6 * CHUNK]), prompt(4 * CHUNK, 4)
    for each in (old, prompt(4 * CHUNK, 5)):
        router.begun(router.place(each, KEY, [0]))
    assert router.place(old, KEY, [0]).num_tokens == 2 * CHUNK


def test_only_the_replicas_that_may_serve_are_chosen() -> None:
    router = Router([10_000] * 3)
    assert {router.place([number], KEY, [1, 2]).replica for number in range(6)} == {1, 2}


def test_many_requests_over_many_replicas_are_balanced() -> None:
    """64 replicas, 10,000 open requests that begin with one of 100 system prompts."""
    router, draws = Router([100_000] * 64), random.Random(6)
    systems = [prompt(4 * CHUNK, seed) for seed in range(100)]
    work = [0] * 64
    hits = 0
    for number in range(10_000):
        place = router.place([*draws.choice(systems), number], KEY, range(64))
        router.begun(place)
        work[place.replica] += 1
        hits += place.num_tokens == 1
    assert max(work) <= 1.15 * sum(work) / 64
    assert hits > 8_000
