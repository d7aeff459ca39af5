"""Llama 4 beyond its logits: checkpoints with a vision tower, pages of past chunks, experts stored apart, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4Config, Llama4ForConditionalGeneration

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.conformance.families.model_samples import TINY
from hardpoint.engine.explain import explain
from hardpoint_plugin_api import AttentionArgs, CheckpointError, ConfigError, Span
from tests.support.checkpoints import (
    LLAMA4,
    check_tokens_equal,
    random_prompts,
    reference_logits,
    write_checkpoint,
    write_tokenizer,
)
from tests.support.engines import prompt_logits, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_a_checkpoint_with_a_vision_tower(tmp_path: Path) -> None:
    """Its language model is served; the tower and the projector are left out."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Llama4Config(text_config=TINY | LLAMA4, vision_config=vision)
    torch.manual_seed(0)
    model = Llama4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert {name.partition(".")[0] for name in names} == {"language_model", "vision_model", "multi_modal_projector"}
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def test_chunks_free_their_pages_so_that_longer_sequences_fit(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 3, "attention_chunk_size": 20, "no_rope_layers": [1, 1, 1], "moe_layers": []}
    model = write_checkpoint(tmp_path, "llama4", **LLAMA4 | changes)
    (prompt,) = random_prompts(1, 200, seed=3, shortest=200)
    page_bytes, pages = 2 * 16 * 2 * 16 * 4, 5  # of 16 tokens, and the null page: far fewer than 240 tokens take
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 300}
    with small_llm(tmp_path, kv_cache_memory=(pages + 1) * 3 * page_bytes, **settings) as llm:
        groups = llm.core.blueprint.ctx.cache_users.cache_groups()
        assert [group.retention for group in groups] == [Span(chunk=20)]
        assert llm.core.scheduler.cache.pool.num_usable == pages
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    """As tools that quantize linear layers alone write them."""
    model = write_checkpoint(tmp_path, "llama4", **LLAMA4)
    path, apart = tmp_path / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        folder, _, matrix = name.rpartition(".")
        if matrix not in ("gate_up_proj", "down_proj") or not folder.endswith("experts"):
            apart[name] = tensor
            continue
        matrices = ["down_proj"] if matrix == "down_proj" else ["gate_proj", "up_proj"]
        for number, expert in enumerate(tensor):
            for each, rows in zip(matrices, expert.T.chunk(len(matrices)), strict=True):
                apart[f"{folder}.{number}.{each}.weight"] = rows.contiguous()
    save_file(apart, path, {"format": "pt"})
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 17}, "'num_experts_per_tok' must be at most the number of experts, got 17 of 6"),
        ({"attention_chunk_size": None}, "'attention_chunk_size' must be a whole number"),
        ({"attn_temperature_tuning": "yes"}, "'attn_temperature_tuning' must be true or false, got 'yes'"),
        ({"no_rope_layers": [1, 1]}, "'no_rope_layers' must have 0 or 1 for each of 4 layers"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
            "rope type 'yarn' changes the length of queries and keys, which 'use_qk_norm'",
        ),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path, "llama4", **LLAMA4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)


@pytest.mark.parametrize("value", [{}, {"num_experts_per_tok": None}], ids=str)
def test_one_expert_per_token_need_not_be_told(value: dict[str, Any], tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama4", **LLAMA4)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("num_experts_per_tok") == 1
    path.write_text(json.dumps(config | value))
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def test_growth_may_be_told_by_a_number(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama4", **LLAMA4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_temperature_tuning": 4}))
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def test_a_backend_that_knows_no_chunks_is_refused(tmp_path: Path) -> None:
    """FlashInfer's attention has windows and no chunks, so layers with chunks get Triton's, on the same GPU."""
    write_checkpoint(tmp_path, "llama4", **LLAMA4)
    rows = [row for row in explain(EngineConfig.create(model=str(tmp_path)), "h100").rows if row.family == "attention"]
    (chunked,) = (row for row in rows if "chunked_local" in str(row.workload))
    reasons = {each.offer.contribution.name: each.reasons for each in chunked.rejected}
    assert str(chunked.chosen) == "triton_paged"
    assert any("chunked_local" in str(reason) for reason in reasons["flashinfer"])


def test_arguments_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="qk_norm_across_heads needs qk_norm_weights"):
        AttentionArgs(64, 4, 2, 16, 0.25, qk_norm_across_heads=True, qk_norm_weights=False)
