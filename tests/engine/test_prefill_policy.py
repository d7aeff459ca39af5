"""Prompts share a step: a short one is not held up by a long one, and no token of a step is left unused for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from hardpoint.engine.scheduling.prefill_policy import PrefillPolicy
from hardpoint.engine.scheduling.request import Request
from hardpoint.engine.scheduling.scheduler import Scheduler
from hardpoint_plugin_api import StepLimits
from tests.engine.scheduling import BLOCK, Device, make_request, make_scheduler

BUDGET = 64
POLICY = PrefillPolicy(threshold=64, max_partial=1, guarantee=16)


class Engine:
    """A scheduler and a device that runs each step at once, and what each request got of the last step."""

    def __init__(
        self, pages: int = 1000, policy: PrefillPolicy = POLICY, slots: int = 8, prefix_caching: bool = False
    ) -> None:
        limits = StepLimits(max_tokens=BUDGET, max_requests=slots)
        self.scheduler: Scheduler = make_scheduler(pages, limits, prefix_caching, prefill=policy)
        self.device = Device(limits, pages)

    def step(self) -> dict[int, int]:
        """Run a step; returns the tokens that each request took of it, by the request's number."""
        before = {request.number: request.num_computed for request in self.scheduler.unfinished}
        known = self.scheduler.unfinished
        step = self.scheduler.schedule()
        assert step is not None
        taken = {r.number: r.num_computed - before[r.number] for r in known if r.num_computed != before[r.number]}
        self.scheduler.commit(self.device.execute(step))
        return taken

    def steps(self, most: int = 100) -> Iterator[dict[int, int]]:
        """Run until nothing is left."""
        for _ in range(most):
            if not self.scheduler.has_unfinished:
                return
            yield self.step()
        pytest.fail("requests do not end")

    def add(self, number: int, length: int, output: int = 4, priority: int = 0) -> Request:
        request = make_request(number, [number] * length, output, priority=priority)
        self.scheduler.add(request)
        return request


def first_token_after(engine: Engine, request: Request) -> int:
    """How many steps ``request`` takes to its first token."""
    for number, _ in enumerate(engine.steps(), 1):
        if request.output_token_ids:
            return number
    raise AssertionError("no token came")


def test_a_short_prompt_starts_beside_a_long_one_and_the_step_is_full() -> None:
    engine = Engine()
    engine.add(0, 600)
    assert engine.step() == {0: BUDGET}
    engine.add(1, 10)
    assert engine.step() == {0: BUDGET - 10, 1: 10}
    assert engine.step() == {0: BUDGET - 1, 1: 1}


def test_without_a_threshold_the_long_prompt_takes_all() -> None:
    engine = Engine(policy=PrefillPolicy())
    engine.add(0, 600)
    engine.step()
    short = engine.add(1, 10)
    assert engine.step() == {0: BUDGET}
    assert first_token_after(engine, short) > 7


def test_the_long_prompt_keeps_its_share_beside_many_short_ones() -> None:
    engine = Engine()
    engine.add(0, 600)
    engine.step()
    for number in range(1, 7):
        engine.add(number, 15)
    assert engine.step() == {0: 16, 1: 15, 2: 15, 3: 15, 4: 3}


def test_short_prompts_pass_a_long_one_that_waits_for_another() -> None:
    engine = Engine()
    first, second = engine.add(0, 300), engine.add(1, 300)
    short = engine.add(2, 10)
    assert engine.step() == {0: BUDGET - 10, 2: 10}
    assert short.output_token_ids
    read = [number for taken in engine.steps() for number, count in taken.items() if count > 1]
    assert read == sorted(read), "long prompts are read one after the other"
    assert first.finish_reason == second.finish_reason == "length"


def test_several_long_prompts_are_read_at_once_where_the_policy_says_so() -> None:
    engine = Engine(policy=PrefillPolicy(threshold=64, max_partial=2, guarantee=16))
    for number in range(3):
        engine.add(number, 300)
    assert engine.step() == {0: BUDGET // 2, 1: BUDGET // 2}


def test_a_more_important_prompt_takes_the_step_from_one_that_is_being_read() -> None:
    engine = Engine()
    engine.add(0, 300, priority=1)
    engine.step()
    urgent = engine.add(1, 2 * BUDGET + 10)
    assert engine.step() == {1: BUDGET}
    assert engine.step() == {1: BUDGET}
    assert engine.step() == {0: BUDGET - 10, 1: 10}
    assert urgent.output_token_ids


def test_a_less_important_prompt_gets_what_an_important_one_leaves() -> None:
    engine = Engine()
    engine.add(0, BUDGET + 20)
    engine.step()
    engine.add(1, 10, priority=1)
    assert engine.step() == {0: 20, 1: 10}
    engine.add(2, 300, priority=-1)
    engine.add(3, 10, priority=1)
    assert engine.step() == {2: BUDGET - 2, 0: 1, 1: 1}, "decodes go on, other prompts wait"


def test_a_request_that_finds_no_page_takes_no_tokens_from_the_long_prompt() -> None:
    pages = (200 + BLOCK) // BLOCK + 2
    engine = Engine(pages)
    engine.add(0, 200)
    engine.step()
    engine.add(1, 12)
    assert engine.step() == {0: BUDGET - 12, 1: 12}
    engine.add(2, 150)
    engine.add(3, 90)
    assert engine.step()[0] == BUDGET - 1, "150 tokens do not fit beside 200"


def test_a_long_prompt_that_is_cached_is_not_long() -> None:
    engine = Engine(prefix_caching=True)
    engine.scheduler.add(make_request(0, [7] * 200, 1))
    for _ in engine.steps():
        pass
    engine.add(1, 600)
    engine.step()
    cached = make_request(2, [7] * 200 + [8] * 6, 4)
    engine.scheduler.add(cached)
    assert engine.step()[1] < BUDGET
    assert cached.num_cached_tokens == 200
    assert cached.output_token_ids


@pytest.mark.parametrize(
    ("limits", "threshold", "expected"),
    [
        (StepLimits(max_tokens=2048), None, PrefillPolicy(2048, 4, 256)),
        (StepLimits(max_tokens=2048), 100, PrefillPolicy(100, 4, 256)),
        (StepLimits(max_tokens=2048), 0, PrefillPolicy(0, 4, 256)),
        (StepLimits(max_tokens=64, chunk_multiple=32), None, PrefillPolicy(64, 4, 32)),
    ],
)
def test_a_policy_fits_the_steps(limits: StepLimits, threshold: int | None, expected: PrefillPolicy) -> None:
    assert PrefillPolicy.within(limits, threshold, 4) == expected


@pytest.mark.parametrize(
    ("others", "room"),
    [
        ([], 64),
        ([(0, 10)], 54),
        ([(0, 30)], 34),
        ([(0, 100)], 32),
        ([(0, 10), (0, 100)], 27),
        ([(0, 100)] * 9, 16),
        ([(-1, 30)], 34),
        ([(-1, 60)], 4),
        ([(-1, 500)], 0),
        ([(1, 500)], 64),
        ([(1, 1)], 63),
    ],
)
def test_room(others: Sequence[tuple[int, int]], room: int) -> None:
    assert POLICY.room(0, 64, others) == room
