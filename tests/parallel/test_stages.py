"""Pipeline stages make the tokens of one stage, in whatever way requests are drawn, cached, cut and preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.cache_users import ModelCaches, united_retentions
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import Blueprint, draw
from hardpoint.engine.execution.memory.cache_memory import CacheMemory
from hardpoint.engine.execution.runner import Runner
from hardpoint.engine.explain import explain
from hardpoint.engine.scheduling.paged_cache import CacheGeometry
from hardpoint.parallel.topology import Topology
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_plugin_api import Communicator, ConfigError, EngineDeadError, PluginLoadError, Span, StructuredOutput
from tests.parallel.ranks import ThreadsExecutor, ranks_in_threads
from tests.support.checkpoints import DEEPSEEK_V2, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import SMALL, small_llm

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = random_prompts(6, 50, seed=1)


def sampling() -> list[SamplingParams]:
    """A way of drawing for each of PROMPTS."""
    common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.9, seed=1, **common),
        SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, **common),
        SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, **common),
        SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, **common),
        SamplingParams(temperature=0.7, seed=3, allowed_token_ids=[5, 6, 7, 8], **common),
    ]


def tokens(llm: LLM, params: list[SamplingParams] | SamplingParams | None = None) -> list[list[int]]:
    """The tokens of PROMPTS, each drawn in its own way."""
    outputs = llm.generate(PROMPTS, params or sampling(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "stages", "settings"),
    [
        pytest.param("qwen3", {}, 1, 2, {"async_scheduling": False}, marks=pytest.mark.nightly),
        ("qwen3", {"tie_word_embeddings": True}, 1, 3, {"async_scheduling": False}),
        pytest.param("qwen3", {}, 1, 3, {"async_scheduling": True}, marks=pytest.mark.nightly),
        pytest.param(
            "llama",
            {"num_hidden_layers": 4, "vocab_size": 261, "tie_word_embeddings": True},
            2,
            2,
            {},
            marks=pytest.mark.nightly,
        ),
        ("qwen3_moe", EXPERTS, 2, 2, {"enable_expert_parallel": True, "async_scheduling": True}),
        pytest.param(
            "gpt_oss",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
            1,
            2,
            {},
            marks=pytest.mark.nightly,
        ),
        ("deepseek_v2", DEEPSEEK_V2, 1, 2, {}),
        ("olmo3", {"num_hidden_layers": 4, "sliding_window": 20}, 2, 2, {}),
    ],
    ids=[
        "untied",
        "tied-3-stages",
        "3-stages-ahead",
        "tied-tp2-pp2",
        "experts-ep2-pp2",
        "windows",
        "latents",
        "norms-of-results",
    ],
)
def test_stages_draw_the_tokens_of_one(
    family: str, changes: dict[str, Any], ranks: int, stages: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Twice: prompts lie in the cache the second time. Long prompts are cut, and 16 tokens at once preempt nobody."""
    write_checkpoint(tmp_path, family, **changes)
    settings = settings | {"max_num_batched_tokens": 32}
    with small_llm(tmp_path, async_scheduling=settings.get("async_scheduling")) as llm:
        wanted = tokens(llm)
    with ranks_in_threads(tmp_path, ranks, pipeline_parallel_size=stages, **settings) as llm:
        assert tokens(llm) == wanted
        assert tokens(llm) == wanted
        assert llm.stats.cached_tokens > 0


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_drafts_are_verified_on_the_last_stage(ahead: bool, tmp_path: Path) -> None:
    """The first one gets them with the step, and then the last token that was right."""
    settings: dict[str, Any] = {"speculative_method": "ngram", "async_scheduling": ahead}
    write_checkpoint(tmp_path, "llama")
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * len(PROMPTS)
    with small_llm(tmp_path) as llm:
        wanted = tokens(llm, params)
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2, **settings) as llm:
        assert tokens(llm, params) == wanted
        assert llm.stats.num_steps < 40


def test_captured_steps(tmp_path: Path) -> None:
    """States arrive in the fixed buffers of captured steps; only sums among ranks would keep gloo's from capture."""
    model = write_checkpoint(tmp_path, "qwen3")
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2) as llm:
        for prompt, found in zip(PROMPTS, tokens(llm, GREEDY), strict=True):
            check_tokens_equal(model, prompt, found)
        replays = [llm.metrics.value("hardpoint_graph_replays_total", pipeline_stage=stage) for stage in "01"]
        assert replays[0] == replays[1] > 0


def test_preemption_aborts_and_sleep(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path) as llm:
        wanted = tokens(llm)
    # Two layers' pages of 16 tokens take 8 KiB each; the other stage has one layer.
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2, kv_cache_memory="80KiB") as llm:
        assert tokens(llm) == wanted
        assert llm.stats.num_preemptions > 0
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        del stream  # aborts the request
        llm.sleep()
        llm.wake_up()
        llm.update_weights(str(tmp_path))
        assert tokens(llm) == wanted


def test_structured_output_and_several_completions(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    pattern = StructuredOutput.regex("[ab]{9}c")
    params = SamplingParams(temperature=1, seed=1, max_tokens=20, n=2, structured=pattern)

    def texts(llm: LLM) -> list[str]:
        return [each.text for output in llm.generate(["x", "y"], params, use_tqdm=False) for each in output.outputs]

    with small_llm(tmp_path) as llm:
        wanted = texts(llm)
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2) as llm:
        assert texts(llm) == wanted


def blueprints(llm: LLM) -> list[Blueprint]:
    assert isinstance(llm.core.executor, ThreadsExecutor)
    return llm.core.executor.blueprints


def test_a_stage_holds_its_own_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=4, tie_word_embeddings=True)
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=3) as llm:
        held = [{name.partition(".")[0] for name, _ in each.model.named_modules() if name} for each in blueprints(llm)]
        blocks = [[number for number, _ in each.model.stack.blocks.named_children()] for each in blueprints(llm)]
        caches = [len(each.ctx.cache_users.users) for each in blueprints(llm)]
    assert held == [{"head", "embedding", "stack"}, {"stack"}, {"head", "stack", "norm"}]
    assert blocks == [["0"], ["1", "2"], ["3"]], "the table weighs more than a block"
    assert caches == [1, 2, 1]


def test_stages_share_block_tables() -> None:
    """Each span has as many groups as the stage that needs most of it."""
    full, window = Span(), Span(window=16)
    assert united_retentions([(window, full), (window, window)]) == (window, window, full)


def test_a_stage_without_caches_has_as_many_pages() -> None:
    users, retentions = ModelCaches(), (Span(),)
    users.share_groups(retentions)
    cache = CacheMemory(users, CacheGeometry(16, retentions, 64), 40, torch.device("cpu"))
    assert (cache.num_pages, cache.views) == (40, [])


def test_a_communicator_that_cannot_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3")
    monkeypatch.setattr(TorchDistributed, "recv", Communicator.recv)
    with pytest.raises(PluginLoadError, match=r"torch_distributed.* needs send and recv to serve pipeline stages"):
        draw(
            EngineConfig.create(
                model=str(tmp_path), **SMALL, pipeline_parallel_size=2, communicator="torch_distributed"
            )
        )


def test_the_first_stage_gets_tokens_when_a_step_continues_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the last stage's tokens after each step would have one stage work at a time."""
    write_checkpoint(tmp_path, "qwen3")
    received: list[int] = []
    real = TorchDistributed.recv

    def recv(communicator: TorchDistributed, x: torch.Tensor, source: int) -> None:
        if source == 1:
            received.append(x.shape[0])
        real(communicator, x, source)

    monkeypatch.setattr(TorchDistributed, "recv", recv)
    settings: dict[str, Any] = {"communicator": "torch_distributed", "max_num_batched_tokens": 32, "max_num_seqs": 6}
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2, **settings) as llm:
        steps = llm.stats.num_steps
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert llm.stats.num_steps - steps > 2
        assert not received
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert sum(received) >= len(PROMPTS)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails_in_a_step(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stage waits for it to send, or to receive."""
    write_checkpoint(tmp_path, "qwen3")
    real = Runner.submit

    def fail(runner: Runner, step: Any) -> Any:
        if runner._ctx.parallel.pp.rank == stage and step.number == 2:
            raise ValueError("the kernel broke")
        return real(runner, step)

    monkeypatch.setattr(Runner, "submit", fail)
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2) as llm:
        said = f"rank {stage} failed, and every rank was ended: ValueError: the kernel broke"
        with pytest.raises(EngineDeadError, match=said):
            llm.generate([[1], [2]], use_tqdm=False)


def test_explain_shows_each_stage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    config = EngineConfig.create(model=str(tmp_path), **SMALL, pipeline_parallel_size=2)
    rows = explain(config).rows
    stages = {of: {row.stage for row in rows if row.family == "layer" and row.of == of} for of in ("embedding", "mlp")}
    assert stages == {"embedding": {0}, "mlp": {0, 1}}
    assert {(row.stage, row.workload) for row in rows if row.family == "communicator"} == {
        (stage, "dtype=float32 parallel=pp ranks=2") for stage in (0, 1)
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel_size": 4}, "pipeline-parallel-size 4: the model has 3 blocks, and each stage needs one"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "executor": "inproc"},
            "--pipeline-parallel-size 2 x --tensor-parallel-size 2 = 4 ranks asks for several",
        ),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 3}, "does not divide among 3 ranks"),
    ],
    ids=["blocks", "executor", "heads"],
)
def test_bad_sizes(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=said):
        draw(EngineConfig.create(model=str(tmp_path), **SMALL, **settings))


def test_where_ranks_are() -> None:
    topology = Topology(tensor=2, expert=2, pipeline=3)
    assert (topology.size, topology.first_ranks) == (6, (0, 2, 4))
    place = topology.on_this_host(3)
    groups = [place.members(name) for name in ("tp", "ep", "expert_tp", "pp")]
    assert groups == [(2, 3), (2, 3), (3,), (1, 3, 5)]
    assert [topology.on_this_host(rank).answers for rank in range(6)] == [False] * 4 + [True, False]
