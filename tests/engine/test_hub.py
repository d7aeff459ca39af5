"""One core behind a hub, as several front ends see it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.control import ReadMetrics, ResetPrefixCache, Sleep, UpdateWeights, WakeUp
from hardpoint.engine.processes.child import hang_up
from hardpoint.engine.remote.hub import Hub
from hardpoint.engine.remote.remote_core import RemoteCore, ThreadLink
from hardpoint.engine.remote.shared_core import SharedCore
from hardpoint.engine.requests import RequestProgress
from hardpoint_plugin_api import ConfigError, EngineDeadError, EngineError, RequestError
from tests.support.engines import until

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.9)


@dataclass
class Shared:
    """A hub, and what it has said."""

    core: RemoteCore
    ended: list[EngineDeadError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hub = Hub(self.core, self.ended.append)

    def join(self) -> SharedCore:
        ours, theirs = multiprocessing.Pipe()
        self.hub.join(ours)
        front_end = SharedCore(theirs)
        front_end.wait_until_ready()
        return front_end


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    config = EngineConfig.create(model="demo", platform="cpu", kv_cache_memory="32MiB", max_num_seqs=16)
    core = RemoteCore(ThreadLink, config)
    core.wait_until_ready()
    shared = Shared(core)
    yield shared
    shared.hub.close()
    assert [str(error) for error in shared.ended] == ["the engine is closed"]


def finish(front_end: SharedCore, *requests: RequestProgress) -> None:
    """Step until these have ended."""
    while any(request.finish_reason is None for request in requests):
        front_end.step()


def add(front_end: SharedCore, prompt: list[int], params: SamplingParams) -> RequestProgress:
    return front_end.add_request(prompt, params, frozenset())


def test_requests_of_equal_numbers_are_kept_apart(shared: Shared) -> None:
    """Both front ends count from 0, and each gets what its own request asks for."""
    first, second = shared.join(), shared.join()
    alone = add(first, [5, 6, 7], SHORT)
    finish(first, alone)
    params = SamplingParams(max_tokens=5, ignore_eos=True, seed=alone.asked.seed, temperature=0.9)
    others = [add(second, [9 + number], SHORT) for number in range(3)]
    again = add(second, [5, 6, 7], params)
    assert alone.number == others[0].number
    finish(second, again, *others)
    assert again.output_token_ids == alone.output_token_ids
    assert all(len(each.output_token_ids) == 5 for each in others)
    assert first.draw_seed() != second.draw_seed()
    first.close()
    second.close()


def test_requests_end_with_their_front_end(shared: Shared) -> None:
    leaving, staying = shared.join(), shared.join()
    kept, ended = add(staying, [1, 2], LONG), add(staying, [2, 3], LONG)
    left = add(leaving, [3, 4], LONG)
    while not left.output_token_ids:
        leaving.step()
    until(lambda: shared.core.stats.num_running == 3)
    hang_up(leaving._connection)  # as the end of its process does
    while not (leaving.step() and left.error):
        pass
    assert isinstance(left.error, EngineDeadError)
    with pytest.raises(EngineDeadError, match="that shares the engine is gone"):
        leaving.check()
    until(lambda: shared.core.stats.num_running == 2)
    staying.abort(ended)
    finish(staying, ended)
    assert (ended.finish_reason, kept.finish_reason) == ("abort", None)
    finish(staying, kept)
    assert len(kept.output_token_ids) == 1500
    staying.close()


def test_verbs_of_one_are_known_to_all(shared: Shared) -> None:
    first, second = shared.join(), shared.join()
    assert first.control(ReadMetrics()).total("hardpoint_cache_pages") > 0
    first.control(ResetPrefixCache())
    first.control(Sleep(("kv",)))
    assert second.is_sleeping
    with pytest.raises(EngineError, match="the engine sleeps"):
        add(second, [1], SHORT)
    second.control(WakeUp(("kv",)))
    assert not first.is_sleeping
    with pytest.raises(RequestError, match="no adapter"):
        second.add_request([1], SHORT, frozenset(), adapter="unknown")
    with pytest.raises(ConfigError, match="tensors can be given"):
        first.control(UpdateWeights([]))
    working = add(first, [1], LONG)
    while not working.output_token_ids:
        first.step()
    with pytest.raises(EngineError, match="requests are under way"):
        second.control(Sleep(("kv",)))
    first.abort(working)
    finish(first, working)
    first.close()
    with pytest.raises(EngineDeadError, match="closed"):
        first.step()
    second.close()


def test_many_threads_of_two_front_ends(shared: Shared) -> None:
    """Requests that are added while others are reported get all of their tokens."""
    front_ends = [shared.join() for _ in range(2)]
    asked: dict[SharedCore, list[RequestProgress]] = {each: [] for each in front_ends}

    def fill(front_end: SharedCore) -> None:
        for number in range(20):
            asked[front_end].append(add(front_end, [number + 1, 7], SHORT))

    threads = [threading.Thread(target=fill, args=(each,)) for each in front_ends]
    for thread in threads:
        thread.start()
    for front_end in front_ends:
        while sum(request.finish_reason is not None for request in asked[front_end]) < 20:
            front_end.step()
        assert all(len(request.output_token_ids) == 5 for request in asked[front_end])
        front_end.close()
    for thread in threads:
        thread.join()
