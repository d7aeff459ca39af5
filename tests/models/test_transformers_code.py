"""Models that run by Transformers' own code in this engine, against Transformers' own runs of the same code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from hardpoint import LLM, LoRARequest, SamplingParams
from hardpoint.models.transformers_code.model import TransformersLM
from hardpoint_plugin_api import CheckpointError, SelectionError, UnknownNameError
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import counted, prompt_logits, small_llm
from tests.support.lora import write_adapter
from tests.support.transformers_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOLERANCE = 1e-4

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "olmo2": {},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {},
    "deepseek_v3": {},
    "bloom": {},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.5 + 0.5 * i for i in range(8)],
        },
        "original_max_position_embeddings": 12,
    },
}


def report_of(llm: LLM) -> tuple[dict[str, int], set[str]]:
    """How many modules each kind of layer replaced, and the classes that stay."""
    report = cast(TransformersLM, llm.core.blueprint.model).report
    return dict(report.replaced), set(report.kept)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens(kind: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, kind, **KINDS[kind])
    with small_llm(tmp_path, max_model_len=128, model_impl="transformers") as llm:
        (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
        expected = reference_logits(model, prompt)
        for chunk in (None, 8):
            difference = (prompt_logits(llm, prompt, chunk) - expected).abs().max()
            assert difference < TOLERANCE, f"chunk {chunk}: logits differ by {difference:.2e}"
        prompts = random_prompts(6, 40, seed=2)
        for each, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, each, output.outputs[0].token_ids, TOLERANCE)
        assert counted(llm)["graph_replays_total"] > 8, "its decode steps are captured"


def test_every_part_of_a_llama_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with small_llm(tmp_path, model_impl="transformers") as llm:
        replaced, kept = report_of(llm)
    assert not kept
    ends = {"embedding": 1, "head": 1}
    assert replaced == ends | {"linear": 12, "merged products": 3, "mlp": 3, "norm": 7, "rotary": 3, "attention": 3}


def test_auto_takes_our_own_code_where_there_is_some(tmp_path: Path) -> None:
    write_tiny(tmp_path / "gpt2", "gpt2")
    write_checkpoint(tmp_path / "llama", "llama")
    with small_llm(tmp_path / "gpt2") as llm:
        assert report_of(llm)[1] == {"LayerNorm", "Embedding"}, "what of a GPT-2 has no layer of ours"
    with small_llm(tmp_path / "llama", model_impl="auto") as llm:
        assert not isinstance(llm.core.blueprint.model, TransformersLM)


def test_features_of_the_engine(tmp_path: Path) -> None:
    """Prefixes found in the cache, chunks, preemption for want of pages, and steps scheduled ahead or not."""
    model = write_tiny(tmp_path, "olmo2")
    shared = random_prompts(1, 40, seed=4, shortest=40)[0]
    prompts = [shared + each for each in random_prompts(6, 20, seed=5)]
    for ahead in (False, True):
        settings: dict[str, Any] = {"max_num_batched_tokens": 16, "kv_cache_memory": 12 * 3 * 2 * 16 * 2 * 16 * 4}
        with small_llm(
            tmp_path, model_impl="transformers", max_model_len=128, async_scheduling=ahead, **settings
        ) as llm:
            for each, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, each, output.outputs[0].token_ids, TOLERANCE)
            again = llm.generate([prompts[-1]], GREEDY, use_tqdm=False)[0]
            assert (again.num_cached_tokens or 0) >= 32
            check_tokens_equal(model, prompts[-1], again.outputs[0].token_ids, TOLERANCE)


def test_two_ranks_by_the_models_own_plan(tmp_path: Path) -> None:
    """OLMo 2 norms all heads' queries at once, so its plan gathers them."""
    model = write_tiny(tmp_path, "olmo2")
    prompts = random_prompts(4, 30, seed=2)
    with small_llm(tmp_path, model_impl="transformers", tensor_parallel_size=2) as llm:
        for each, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, each, output.outputs[0].token_ids, TOLERANCE)


def test_weights_are_quantized_as_in_our_own_code(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    (prompt,) = random_prompts(1, 40, seed=1, shortest=40)
    found = []
    for impl in ("auto", "transformers"):
        with small_llm(tmp_path, quantization="int8", model_impl=impl) as llm:
            found.append(prompt_logits(llm, prompt))
    assert (found[0] - found[1]).abs().max() < TOLERANCE


def test_adapters_are_added(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "llama", "llama")
    adapted = write_adapter(tmp_path / "adapter", model)
    prompts = random_prompts(2, 30, seed=3)
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with small_llm(tmp_path / "llama", model_impl="transformers", enable_lora=True) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[request, None])
        for judge, each, output in zip((adapted, model), prompts, outputs, strict=True):
            check_tokens_equal(judge, each, output.outputs[0].token_ids, TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba2", "mixes tokens outside of attention (convolution): it keeps a state"),
        ("xglm", "computes scores between tokens itself"),
        ("bert", "attention that is not causal"),
        ("bart", "counts positions itself"),
    ],
)
def test_code_that_cannot_run_is_refused(kind: str, reason: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, kind)
    with pytest.raises(CheckpointError, match="cannot run by Transformers' code") as error:
        small_llm(tmp_path)
    assert reason in str(error.value)


def test_pipeline_stages_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(SelectionError, match="pipeline_stages not supported"):
        small_llm(tmp_path, model_impl="transformers", pipeline_parallel_size=2)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it was run')\n")
    path.write_text(json.dumps(config | {"model_type": "own"}))
    with pytest.raises(CheckpointError, match="'auto_map' names code of the checkpoint's own, which is never run"):
        small_llm(tmp_path)
    path.write_text(json.dumps(config | {"architectures": ["OwnForCausalLM"]}))
    with pytest.raises(UnknownNameError, match="OwnForCausalLM"):
        small_llm(tmp_path)
