"""Data parallelism: replicas behind one front end answer as one core does, and share failures and verbs."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from hardpoint import LLM, AsyncEngine, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.control import LoadAdapter, ReadMetrics, ReportMemory, ResetPrefixCache, Sleep, WakeUp
from hardpoint.engine.remote.hub import Hub
from hardpoint.engine.remote.remote_core import RemoteCore, ThreadLink
from hardpoint.engine.remote.replicas import Replicas
from hardpoint.engine.remote.shared_core import SharedCore
from hardpoint.engine.requests import RequestProgress
from hardpoint_plugin_api import CapacityError, ConfigError, EngineDeadError, EngineError, RequestError
from tests.support.checkpoints import random_prompts

SETTINGS: dict[str, Any] = {"model": "demo", "platform": "cpu", "kv_cache_memory": "16MiB", "max_num_seqs": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = random_prompts(6, 30, seed=1)


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    core = Replicas(partial(RemoteCore, ThreadLink), EngineConfig.create(**SETTINGS, data_parallel_size=2))
    core.wait_until_ready()
    yield core
    core.close()
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        [core.step() for _ in range(100)]


def add(core: Any, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> RequestProgress:
    request: RequestProgress = core.add_request(prompt, params, frozenset(), **options)
    return request


def finish(core: Any, *requests: RequestProgress) -> None:
    while any(request.finish_reason is None for request in requests):
        core.step()


def steps_of(core: Replicas) -> list[int]:
    return [each.stats.num_steps for each in core._cores]


def test_tokens_are_those_of_one_core_and_both_serve(replicas: Replicas) -> None:
    before = steps_of(replicas)
    drawn = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    requests = [add(replicas, prompt, params) for prompt in PROMPTS for params in (GREEDY, drawn)]
    finish(replicas, *requests)
    with LLM(**SETTINGS) as llm:
        outputs = [
            llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS for params in (GREEDY, drawn)
        ]
    assert [r.output_token_ids for r in requests] == [list(output.outputs[0].token_ids) for output in outputs]
    assert all(now > then for now, then in zip(steps_of(replicas), before, strict=True))


def test_a_prompt_finds_its_prefix(replicas: Replicas) -> None:
    """It goes to the replica that has computed it, though another has less to do."""
    prompt = PROMPTS[0] * 20
    first = add(replicas, prompt)
    finish(replicas, first)
    again = [add(replicas, [*prompt, number]) for number in range(2)]
    finish(replicas, *again)
    assert all(request.num_cached_tokens >= 512 for request in again)
    replicas.control(ResetPrefixCache())
    last = add(replicas, prompt)
    finish(replicas, last)
    assert last.num_cached_tokens == 0


def test_requests_without_seed_differ(replicas: Replicas) -> None:
    """Replicas have one seed; their requests draw from one sequence of seeds."""
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    requests = [add(replicas, [5, 6, 7], params) for _ in range(4)]
    finish(replicas, *requests)
    assert len({tuple(request.output_token_ids) for request in requests}) == 4


def test_a_replica_that_is_asked_for_serves(replicas: Replicas) -> None:
    before = steps_of(replicas)
    finish(replicas, *[add(replicas, [5, 6, 7], data_parallel_rank=1) for _ in range(3)])
    after = steps_of(replicas)
    assert (after[0] == before[0], after[1] > before[1]) == (True, True)


def test_a_request_is_aborted_where_it_runs(replicas: Replicas) -> None:
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
    requests = [add(replicas, [5, 6, 7], params) for _ in range(2)]
    replicas.step()
    for request in requests:
        replicas.abort(request)
    finish(replicas, *requests)
    assert {request.finish_reason for request in requests} == {"abort"}
    assert all(replica.num_open == 0 for replica in replicas._router._replicas)


def test_verbs_reach_every_replica_and_answers_are_joined(replicas: Replicas) -> None:
    both = [core.control(ReportMemory()).by_tag["weights"] for core in replicas._cores]
    assert replicas.control(ReportMemory()).by_tag["weights"] == sum(both) > 0
    tokens = [core.control(ReadMetrics()).total("hardpoint_tokens_total") for core in replicas._cores]
    assert replicas.control(ReadMetrics()).total("hardpoint_tokens_total") == sum(tokens)
    asleep = replicas.control(Sleep(("kv", "resources")))
    assert asleep == replicas.asleep == {"kv", "resources"}
    with pytest.raises(EngineError, match="the engine sleeps"):
        add(replicas, [5])
    assert replicas.control(WakeUp(("kv", "resources"))) == frozenset()
    finish(replicas, add(replicas, [5, 6]))


def test_an_adapter_that_one_replica_cannot_load_is_loaded_on_none(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def loads(verb: object) -> object:
        asked.append(verb)
        return ()

    def fails(verb: object) -> object:
        raise CapacityError("every slot is taken")

    monkeypatch.setattr(replicas._cores[0], "control", loads)
    monkeypatch.setattr(replicas._cores[1], "control", fails)
    verb = LoadAdapter("a", "folder", "folder")
    with pytest.raises(CapacityError, match="every slot is taken"):
        replicas.control(verb)
    assert asked == [verb, verb.undo()]


def test_several_front_ends_share_replicas() -> None:
    core = Replicas(partial(RemoteCore, ThreadLink), EngineConfig.create(**SETTINGS, data_parallel_size=2))
    core.wait_until_ready()
    hub = Hub(core, lambda error: None)
    ours, theirs = multiprocessing.Pipe()
    hub.join(ours)
    front_end = SharedCore(theirs)
    front_end.wait_until_ready()
    requests = [add(front_end, [5, 6, 7], data_parallel_rank=number) for number in range(2)]
    finish(front_end, *requests)
    assert requests[0].output_token_ids == requests[1].output_token_ids
    assert all(steps_of(core))
    front_end.close()
    hub.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_rank": 2}, "replicas 2 to 2 were asked for, and data_parallel_size = 2 has replicas 0 to 1"),
        ({"data_parallel_rank": 0, "data_parallel_start_rank": 1}, "contradicts data_parallel_start_rank = 1"),
        ({"core_process": False}, "needs a process for each replica"),
        ({"executor": "torchrun"}, "start it once for each replica"),
    ],
)
def test_replicas_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(**SETTINGS, data_parallel_size=2, **settings)


def test_each_replica_has_devices_of_its_own() -> None:
    config = EngineConfig.create(
        **SETTINGS, data_parallel_size=6, data_parallel_start_rank=2, data_parallel_size_local=3, tensor_parallel_size=2
    )
    places = [config.of_replica(number).topology.on_this_host(rank) for number in (2, 3, 4) for rank in (0, 1)]
    assert [place.local_rank for place in places] == list(range(6))
    assert {place.local_ranks for place in places} == {6}
    assert "--data-parallel-size 3 x --tensor-parallel-size 2 = 6 ranks" in str(places[0].topology)


def test_a_rank_of_another_server_is_refused_with_the_modes_named() -> None:
    config = EngineConfig.create(**SETTINGS, data_parallel_size=4, data_parallel_rank=3)
    config.check_data_parallel_rank(3)
    config.check_data_parallel_rank(None)
    with pytest.raises(RequestError, match=r"this server has replica 3 of 4.*internal.*hybrid.*external"):
        config.check_data_parallel_rank(1)


async def _read(engine: AsyncEngine, prompt: Any, **options: Any) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    tokens: list[int] = []
    async for output in engine.generate(prompt, params, **options):
        tokens = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.parametrize("restarts", [True, False])
def test_a_replica_that_is_killed(restarts: bool) -> None:
    """It is built again, and its requests go on; or all replicas end, and each request says why."""
    policy: dict[str, Any] = {"on_engine_failure": "restart"} if restarts else {}

    async def run() -> None:
        async with AsyncEngine(**SETTINGS, data_parallel_size=2, **policy) as engine:
            assert isinstance(engine.client, Replicas)
            pids = [core.facts.pid for core in engine.client._cores]
            expected = await _read(engine, PROMPTS[0], data_parallel_rank=0)
            reading = [asyncio.create_task(_read(engine, PROMPTS[0], data_parallel_rank=n % 2)) for n in range(4)]
            while engine.stats.num_running < 4:
                await asyncio.sleep(0.01)
            counted = (await engine.metrics()).value("hardpoint_generated_tokens_total")
            os.kill(pids[1], signal.SIGKILL)
            if restarts:
                while engine.client._cores[1].recovery.restarting is None:
                    await asyncio.sleep(0.001)
                assert engine.recovery.restarting is None  # the other replica serves
                assert (await engine.metrics()).value("hardpoint_generated_tokens_total") >= counted
            answers = await asyncio.gather(*reading, return_exceptions=True)
            if restarts:
                assert answers == [expected] * 4
                assert engine.recovery.num_restarts == 1
                assert await _read(engine, PROMPTS[0], data_parallel_rank=1) == expected
                # The last core's count is that of the last reading: a sum that falls would be a new beginning of both.
                assert (await engine.metrics()).value("hardpoint_generated_tokens_total") >= counted + 200
            else:
                assert all(isinstance(answer, EngineDeadError) for answer in answers)
                assert all("replica 1: " in str(answer) for answer in answers)
                assert not engine.is_running

    asyncio.run(run())
