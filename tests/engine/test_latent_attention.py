"""Latent attention in whole engines: what its cache holds, prefixes, quantized checkpoints, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint_plugin_api import CheckpointError, SelectionError, UnknownNameError
from tests.support.checkpoints import (
    DEEPSEEK_V2,
    DEEPSEEK_V32,
    LARGE_LATENT,
    check_tokens_equal,
    random_prompts,
    reference_logits,
    write_checkpoint,
)
from tests.support.engines import prompt_logits, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, write_checkpoint(folder, "deepseek_v2", **DEEPSEEK_V2)


@pytest.fixture(scope="module")
def sparse_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("sparse")
    return folder, write_checkpoint(folder, "deepseek_v32", **DEEPSEEK_V32)


@pytest.fixture(params=["dense", "sparse", "large_latent"])
def either(
    request: pytest.FixtureRequest,
    checkpoint: tuple[Path, PreTrainedModel],
    sparse_checkpoint: tuple[Path, PreTrainedModel],
    tmp_path: Path,
) -> tuple[Path, PreTrainedModel]:
    """Latents alone, latents beside index keys, by which each query's positions are chosen, and latents so large that
    short chunks of prompts take the unabsorbed form."""
    if request.param == "large_latent":
        return tmp_path, write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK_V2 | LARGE_LATENT)
    return checkpoint if request.param == "dense" else sparse_checkpoint


@pytest.mark.parametrize("ahead", [False, True])
def test_prefixes_chunks_and_preemption(either: tuple[Path, PreTrainedModel], ahead: bool) -> None:
    """Pages for some of the requests alone; then one prompt twice, which is found in the cache."""
    folder, model = either
    prompts = random_prompts(6, 60, seed=3, shortest=20)
    prompts += [[*prompt, 1, 2] for prompt in prompts]
    index_key = getattr(model.config, "index_head_dim", 0)
    page = 16 * (model.config.kv_lora_rank + 8 + index_key) * 4 * 3
    settings: dict[str, Any] = {"kv_cache_memory": 14 * page, "max_num_batched_tokens": 24, "max_model_len": 128}
    with small_llm(folder, async_scheduling=ahead, **settings) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert llm.stats.num_preemptions > 0
        for _ in range(2):
            (output,) = llm.generate(prompts[-1:], GREEDY, use_tqdm=False)
            check_tokens_equal(model, prompts[-1], output.outputs[0].token_ids)
        assert llm.stats.cached_tokens > 0


def test_drafts_are_verified(either: tuple[Path, PreTrainedModel]) -> None:
    """A request has several tokens in a step, of which some are taken back."""
    folder, model = either
    prompts = [prompt * 3 for prompt in random_prompts(5, 20, seed=2, shortest=8)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with small_llm(folder, speculative_method="ngram", num_speculative_tokens=3) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert 0 < llm.stats.accepted_tokens < llm.stats.drafted_tokens


def test_a_token_has_one_latent_and_one_rotated_key(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    with small_llm(checkpoint[0]) as llm:
        users = llm.core.blueprint.ctx.cache_users.users
        assert len(users) == 3
        assert {(p.name, p.shape, p.dtype) for user in users for p in user.spec.planes} == {
            ("latent", (24,), "float32"),
            ("rope_key", (8,), "float32"),
        }
        (row,) = {(r.of, r.chosen, r.workload) for r in llm.table.rows if r.family == "attention"}
    assert row[:2] == ("latent", "cpu_native_latent")
    assert "num_heads=4 latent_size=24 rope_size=8" in row[2]


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_quantized_matrices_are_absorbed(checkpoint: tuple[Path, PreTrainedModel], method: str) -> None:
    """The matrix of keys and values is made plain again; what is left is the error of rounding weights."""
    folder, model = checkpoint
    (prompt,) = random_prompts(1, 40, seed=5, shortest=40)
    expected = reference_logits(model, prompt)
    with small_llm(folder, quantization=method) as llm:
        difference = (prompt_logits(llm, prompt) - expected).norm() / expected.norm()
    assert 1e-4 < difference < 0.15


def test_latents_of_8_bits(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Rotated keys stay as wide as the model; what is left is the error of rounding latents, of earlier chunks."""
    folder, model = checkpoint
    (prompt,) = random_prompts(1, 40, seed=5, shortest=40)
    expected = reference_logits(model, prompt)
    with small_llm(folder, kv_cache_dtype="fp8_e4m3") as llm:
        planes = {(p.name, p.dtype) for user in llm.core.blueprint.ctx.cache_users.users for p in user.spec.planes}
        assert planes == {("latent", "float8_e4m3fn"), ("rope_key", "float32")}
        difference = (prompt_logits(llm, prompt, chunk=8) - expected).norm() / expected.norm()
    assert 1e-4 < difference < 0.1


def test_sleep_and_other_weights(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """The plain matrices are made anew each time."""
    folder, model = checkpoint
    other = write_checkpoint(tmp_path, "deepseek_v2", seed=1, **DEEPSEEK_V2)
    prompts = random_prompts(3, 30, seed=6)
    with small_llm(folder) as llm:
        llm.sleep(level=2)
        llm.wake_up()
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        llm.update_weights(tmp_path)
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(other, prompt, output.outputs[0].token_ids)


def test_choices_by_kind(checkpoint: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture) -> None:
    """A name that is offered for causal attention alone decides nothing here, and is refused for this kind."""
    folder, _ = checkpoint
    with small_llm(folder, attention_backend="cpu_native") as llm:
        (rule,) = {row.rule for row in llm.table.rows if row.family == "attention"}
        assert rule == "priority"
    assert "--attention-backend cpu_native has no effect" in caplog.text
    with small_llm(folder, use={"attention.latent": "reference"}) as llm:
        (rule,) = {row.rule for row in llm.table.rows if row.family == "attention"}
        assert rule == "flag"
    with pytest.raises(UnknownNameError, match="attention latent implementation"):
        small_llm(folder, use={"attention.latent": "cpu_native"})
    kinds = ("reference", "cpu_native_latent")
    names = tuple(f"attention.latent={kind}{mode}" for kind in kinds for mode in ("", "_batch_invariant"))
    with pytest.raises(SelectionError, match="nothing can serve attention latent"):
        small_llm(folder, deny=names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method greedy or group_limited_greedy, got 'softmax' and 'noaux_tc'"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'softmax'"),
        ({"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "groups must divide the experts"),
        ({"mlp_bias": True}, "'mlp_bias' must be false"),
        ({"first_k_dense_replace": -1}, "'first_k_dense_replace' must be a whole number"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK_V2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)
