"""Several ranks make the tokens of one: each way of dividing a model, every communicator, every all2all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from tests.parallel.ranks import ThreadsExecutor, ranks_in_threads
from tests.support.checkpoints import (
    BAMBA,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GATED_DELTA,
    GATED_DELTA_MOE,
    GLM4_MOE,
    KIMI_LINEAR,
    LLAMA4,
    NEMOTRON_H,
    check_tokens_equal,
    random_prompts,
    write_checkpoint,
)
from tests.support.engines import SMALL, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

DENSE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, {}),
    "shared-kv-heads": ("qwen3", 2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "biases-uneven-vocabulary": ("qwen2", 4, {"vocab_size": 261}),
    "tied-uneven-vocabulary": ("llama", 4, {"vocab_size": 261, "tie_word_embeddings": True}),
    "windows": ("mistral", 2, {"sliding_window": 20}),
    "latents": ("deepseek_v2", 2, DEEPSEEK_V2),
    "latents-queries-uncompressed": ("deepseek_v2", 4, DEEPSEEK_V2 | {"q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", 2, DEEPSEEK_V3),
    "sparse-latents": ("deepseek_v32", 2, DEEPSEEK_V32),
    "glm4-moe": ("glm4_moe", 2, GLM4_MOE),
    "gated-delta-nets": ("qwen3_next", 2, GATED_DELTA_MOE),
    "gated-delta-nets-shared-key-heads": (
        "qwen3_5",
        4,
        GATED_DELTA | {"linear_num_value_heads": 8, "num_key_value_heads": 4, "attention_bias": True},
    ),
    "decays-of-channels": ("kimi_linear", 2, KIMI_LINEAR),
    "mamba": ("bamba", 2, BAMBA),
    "one-sub-layer-blocks": ("nemotron_h", 2, NEMOTRON_H),
    "gate-and-up-in-one-tensor": ("glm4", 2, {}),
    "qkv-in-one-tensor": ("phi3", 2, {}),
    "norms-across-heads": ("olmo2", 2, {}),
    "norms-across-shared-kv-heads": ("olmo2", 4, {"num_key_value_heads": 2}),
    "chunks-and-growing-queries": ("llama4", 2, LLAMA4 | {"interleave_moe_layer_step": 2}),
    "multiplied": ("granite", 2, {"residual_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "windows-and-norms-of-results": ("gemma2", 2, {"sliding_window": 20, "vocab_size": 261}),
}

BY_NIGHT = {
    "tied-uneven-vocabulary",
    "latents-queries-uncompressed",
    "deepseek-v3",
    "gated-delta-nets-shared-key-heads",
    "norms-across-heads",
}
"""Of each of their features another case has one, too."""

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "llama4": LLAMA4 | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {}),
    "ep2": (2, {"enable_expert_parallel": True}),
    "ep4": (4, {"enable_expert_parallel": True}),
    "tp2-ep2": (4, {"expert_parallel_size": 2}),
}
ALL2ALLS = ("replicated", "naive", "allgather_reducescatter", "all_to_all")
COMMUNICATORS = ("torch_distributed", "gather_and_sum")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Checkpoints of mixtures by family; written once."""
    found = {}
    for family, changes in EXPERTS.items():
        folder = tmp_path_factory.mktemp(family)
        found[family] = folder, write_checkpoint(folder, family, **changes)
    return found


def check(llm: LLM, model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Compare with Transformers, which the engine of one rank is compared with too."""
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] * (case in BY_NIGHT)) for case in DENSE]
)
def test_dense_models(case: str, tmp_path: Path) -> None:
    family, ranks, changes = DENSE[case]
    model = write_checkpoint(tmp_path, family, **changes)
    with ranks_in_threads(tmp_path, ranks) as llm:
        check(llm, model, random_prompts(6, 50, seed=1))


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_every_communicator(communicator: str, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, model = models["mixtral"]
    with ranks_in_threads(folder, 4, communicator=communicator, expert_parallel_size=2) as llm:
        chosen = {row.chosen for row in llm.table.rows if row.family == "communicator"}
        assert chosen == {communicator}
        check(llm, model, random_prompts(4, 30, seed=2))


def test_prefixes_chunks_and_seeds(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3")
    prompts = random_prompts(5, 60, seed=3)
    prompts += [[*prompt, 1, 2] for prompt in prompts]
    drawn = [SamplingParams(temperature=0.9, seed=i, max_tokens=10, ignore_eos=True) for i, _ in enumerate(prompts)]
    scored = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "async_scheduling": True}
    with small_llm(tmp_path, **settings) as llm:
        wanted = llm.generate(prompts, drawn, use_tqdm=False)
        wanted_scores = llm.generate(prompts[:2], scored, use_tqdm=False)
    with ranks_in_threads(tmp_path, 2, **settings) as llm:
        check(llm, model, prompts)
        check(llm, model, prompts)
        assert llm.stats.cached_tokens > 0
        found = llm.generate(prompts, drawn, use_tqdm=False)
        scores = llm.generate(prompts[:2], scored, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    for ours, theirs in zip(scores, wanted_scores, strict=True):
        for mine, other in zip(ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True):
            assert {t: p.logprob for t, p in mine.items()} == pytest.approx({t: p.logprob for t, p in other.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixtures(layout: str, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    ranks, settings = LAYOUTS[layout]
    folder, model = models["qwen3_moe"]
    with ranks_in_threads(folder, ranks, **settings) as llm:
        check(llm, model, random_prompts(4, 30, seed=4))


@pytest.mark.parametrize("layout", ["tp2", "tp2-ep2"])
def test_biases_of_experts_are_added_once(layout: str, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    ranks, settings = LAYOUTS[layout]
    folder, model = models["gpt_oss"]
    with ranks_in_threads(folder, ranks, **settings) as llm:
        check(llm, model, random_prompts(4, 30, seed=4))


def test_weights_of_inputs(models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    """The router's weight is applied where a token's hidden state is, before it goes to its expert's rank."""
    ranks, settings = LAYOUTS["ep2"]
    folder, model = models["llama4"]
    with ranks_in_threads(folder, ranks, **settings, all2all_backend="all_to_all") as llm:
        check(llm, model, random_prompts(4, 30, seed=4))


@pytest.mark.parametrize(
    ("all2all", "layout"),
    [
        pytest.param("replicated", "ep4", marks=pytest.mark.nightly),
        pytest.param("naive", "ep4", marks=pytest.mark.nightly),
        ("allgather_reducescatter", "ep4"),
        ("all_to_all", "tp2-ep2"),
        pytest.param("all_to_all", "ep4", marks=pytest.mark.nightly),
    ],
)
def test_every_all2all(all2all: str, layout: str, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    """One token in a step leaves three of four ranks without any, and thirteen do not divide."""
    ranks, settings = LAYOUTS[layout]
    folder, model = models["mixtral"]
    with ranks_in_threads(folder, ranks, all2all_backend=all2all, **settings) as llm:
        chosen = {row.chosen for row in llm.table.rows if row.family == "all2all"}
        assert chosen == {all2all}
        check(llm, model, [[7], random_prompts(1, 13, seed=5, shortest=13)[0]])
        check(llm, model, [[9]])


@pytest.mark.nightly
@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("layout", ["ep2", "ep4", "tp2-ep2"])
@pytest.mark.parametrize("all2all", ALL2ALLS)
@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_all_together(
    family: str, layout: str, all2all: str, communicator: str, models: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    ranks, settings = LAYOUTS[layout]
    folder, model = models[family]
    options = settings | {"all2all_backend": all2all, "communicator": communicator, "max_num_batched_tokens": 24}
    with ranks_in_threads(folder, ranks, **options) as llm:
        check(llm, model, random_prompts(6, 60, seed=6))


def test_the_demo_model() -> None:
    prompts = ["The quick brown", "It was a dark"]
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM("demo", dtype="float32", **SMALL) as llm:
        wanted = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    with ranks_in_threads("demo", 2, dtype="float32") as llm:
        assert [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)] == wanted


@pytest.mark.parametrize(
    ("family", "communicator"),
    [("qwen3", "gather_and_sum"), ("qwen3", "cpu_shared_memory"), ("olmo2", "cpu_shared_memory")],
)
def test_batch_invariance(family: str, communicator: str, tmp_path: Path) -> None:
    """A request's tokens and their log-probabilities are the same to the bit, alone or among others."""
    model = write_checkpoint(tmp_path, family)
    prompts = random_prompts(5, 40, seed=7)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=8, logprobs=1, ignore_eos=True)
    with ranks_in_threads(tmp_path, 2, batch_invariant=True, communicator=communicator) as llm:
        assert {row.chosen for row in llm.table.rows if row.family == "communicator"} == {communicator}
        assert isinstance(llm.core.executor, ThreadsExecutor)
        check(llm, model, prompts)
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, among_others in zip(prompts, together, strict=True):
            (alone,) = llm.generate([prompt], params, use_tqdm=False)
            assert alone.outputs[0] == among_others.outputs[0]
