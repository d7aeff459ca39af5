"""Replicas that share experts make the tokens of one process, whatever load each of them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.control import ReadMetrics, Sleep, UpdateWeights, WakeUp
from hardpoint.engine.explain import explain
from hardpoint.engine.remote.replicas import Replicas
from hardpoint.engine.requests import RequestProgress
from hardpoint.layers import moe
from hardpoint_plugin_api import ConfigError, EngineError, SelectionError
from tests.parallel.ranks import sharing_replicas
from tests.support.checkpoints import (
    DEEPSEEK_V3,
    GATED_DELTA_MOE,
    check_tokens_equal,
    random_prompts,
    write_checkpoint,
)

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PROMPTS = random_prompts(5, 60, seed=1)
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, write_checkpoint(folder, "qwen3_moe", **MIXTURE)


def add(core: Replicas, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> RequestProgress:
    return core.add_request(prompt, params, frozenset(), **options)


def finish(core: Replicas, *requests: RequestProgress) -> None:
    while any(request.finish_reason is None for request in requests):
        core.step()


def check(model: PreTrainedModel, requests: list[RequestProgress], prompts: list[list[int]]) -> None:
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.error is None
        check_tokens_equal(model, prompt, request.output_token_ids)


def serve_unevenly(core: Replicas, model: PreTrainedModel) -> None:
    """One replica idle, then the other, then both with other numbers of requests, one of which is aborted."""
    for rank in (0, 1):
        alone = [add(core, prompt, data_parallel_rank=rank) for prompt in PROMPTS[:2]]
        finish(core, *alone)
        check(model, alone, PROMPTS[:2])
    aborted = add(core, PROMPTS[0], ENDLESS, data_parallel_rank=1)
    first = add(core, PROMPTS[4], data_parallel_rank=1)
    core.step()
    requests = [add(core, prompt, data_parallel_rank=int(n == 3)) for n, prompt in enumerate(PROMPTS)]
    finish(core, first)
    core.abort(aborted)
    finish(core, aborted, *requests)
    check(model, [first, *requests], [PROMPTS[4], *PROMPTS])
    assert aborted.finish_reason == "abort"


def test_prompts_over_several_blocks_of_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state has the null page for all blocks but the newest. Tokens of these blocks are no padding."""
    monkeypatch.setattr(moe, "_MANY_TOKENS", 16)
    model = write_checkpoint(tmp_path, "qwen3_next", **GATED_DELTA_MOE)
    prompts = random_prompts(2, 90, shortest=80, seed=1)
    with sharing_replicas(tmp_path) as core:
        requests = [add(core, prompt, data_parallel_rank=rank) for rank, prompt in enumerate(prompts)]
        finish(core, *requests)
    check(model, requests, prompts)


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("deepseek_v3", DEEPSEEK_V3, {}),
        pytest.param("qwen3_next", GATED_DELTA_MOE, {}, marks=NIGHTLY),
        pytest.param("qwen3_moe", MIXTURE, {"tensor_parallel_size": 2}, marks=NIGHTLY),
        pytest.param("deepseek_v3", DEEPSEEK_V3, {"pipeline_parallel_size": 2}, marks=NIGHTLY),
        pytest.param(
            "deepseek_v3", DEEPSEEK_V3, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=NIGHTLY
        ),
        pytest.param("mixtral", {"num_local_experts": 6}, {"data_parallel_size": 3}, marks=NIGHTLY),
        pytest.param("qwen3_moe", MIXTURE, {"speculative_method": "ngram"}, marks=NIGHTLY),
    ],
)
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=NIGHTLY)], ids=["depth 0", "ahead"])
def test_tokens(family: str, changes: dict[str, Any], settings: dict[str, Any], ahead: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family, **changes)
    replicas = settings.pop("data_parallel_size", 2)
    settings = settings | {"max_num_batched_tokens": 32, "async_scheduling": ahead}
    with sharing_replicas(tmp_path, replicas, **settings) as core:
        serve_unevenly(core, model)


@pytest.mark.parametrize(
    "all2all",
    [
        pytest.param("naive", marks=NIGHTLY),
        pytest.param("all_to_all", marks=NIGHTLY),
        pytest.param("cpu_shared_memory", marks=NIGHTLY),
        "allgather_reducescatter",
    ],
)
def test_every_exchange(all2all: str, mixture: tuple[Path, PreTrainedModel]) -> None:
    with sharing_replicas(mixture[0], all2all_backend=all2all) as core:
        assert {row.chosen for row in core.facts.table.rows if row.family == "all2all"} == {all2all}
        serve_unevenly(core, mixture[1])
        steps = core.control(ReadMetrics()).total("hardpoint_eager_steps_total")
        assert steps > core.stats.num_steps, "idle replicas ran empty steps"


def test_verbs_that_need_all_idle(mixture: tuple[Path, PreTrainedModel]) -> None:
    """While a request runs on either replica, neither sleeps; no request is taken while either sleeps."""
    with sharing_replicas(mixture[0]) as core:
        running = add(core, PROMPTS[0], ENDLESS, data_parallel_rank=1)
        core.step()
        for verb in (Sleep(("weights",)), UpdateWeights(str(mixture[0]))):
            with pytest.raises(
                EngineError,
                match="requests are under way; an engine is put to sleep, or given other weights, when they",
            ):
                core.control(verb)
        assert not core.asleep
        core.abort(running)
        core.control(Sleep(("kv", "weights")))
        core._cores[0].control(WakeUp(("kv", "weights")))
        with pytest.raises(EngineError, match="the engine sleeps, without its kv, weights"):
            add(core, PROMPTS[0], data_parallel_rank=0)
        core.control(WakeUp(("kv", "weights")))
        core.control(UpdateWeights(str(mixture[0])))
        requests = [add(core, prompt) for prompt in PROMPTS]
        finish(core, *requests)
        check(mixture[1], requests, PROMPTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data_parallel_rank": 0},
            "and this server has 1 of data_parallel_size = 2, so that it must find the other servers; give each",
        ),
        ({"executor": "torchrun", "data_parallel_rank": 0}, "torchrun numbers the ranks of all replicas; leave it out"),
        ({"executor": "inproc"}, "executor = 'inproc' does not serve that"),
        ({"data_parallel_address": "host"}, "takes effect where replicas of several servers share experts"),
        ({"data_parallel_rpc_port": 2, "expert_parallel_size": 1, "enable_expert_parallel": False}, "port = 2 takes"),
        ({"data_parallel_rpc_port": 65536}, "65535"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(model="demo", **(given | settings))


@pytest.mark.parametrize("device", [None, "h200"])
def test_it_is_explained(device: str | None, mixture: tuple[Path, PreTrainedModel]) -> None:
    """By the size of the group that the experts are divided among, and an all2all that serves it."""
    config = EngineConfig.create(
        model=str(mixture[0]), data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True
    )
    rows = {row.family: row for row in explain(config, device).rows}
    assert "ranks=4" in rows["all2all"].workload
    assert "features=several_replicas" in rows["all2all"].workload
    assert rows["all2all"].chosen in (
        ("cuda_peer_memory",) if device else ("cpu_shared_memory", "allgather_reducescatter")
    )
    assert "num_experts=2 " in rows["experts"].workload


def test_replicas_that_share_no_experts() -> None:
    apart = EngineConfig.create(
        model="demo", data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True, expert_parallel_size=2
    )
    assert (apart.topology.shares_experts, apart.topology.expert) == (False, 2)


def test_a_model_without_experts() -> None:
    with (
        pytest.raises(ConfigError, match="--enable-expert-parallel: demo has no mixture of experts"),
        sharing_replicas("demo"),
    ):
        pass


def test_an_exchange_of_replicated_tokens_is_refused(mixture: tuple[Path, PreTrainedModel]) -> None:
    with (
        pytest.raises(SelectionError, match="several_replicas not supported"),
        sharing_replicas(mixture[0], all2all_backend="replicated"),
    ):
        pass
