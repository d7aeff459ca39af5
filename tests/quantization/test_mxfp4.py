"""gpt-oss with experts as it stores them: the logits of Transformers, which dequantizes the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from hardpoint_plugin_api import CheckpointError, ConfigError
from tests.parallel.ranks import ranks_in_threads
from tests.quantization.test_divided import prompt_scores
from tests.quantization.writing import change_config, change_tensors
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

SIZES: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64}
CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""As in openai/gpt-oss-20b's config.json."""


def write_gpt_oss(folder: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> None:
    """Write a random gpt-oss whose experts are random codes and scales, but for what ``config`` excludes."""
    write_checkpoint(folder, "gpt_oss", sliding_window=9, **(SIZES | changes))
    draw = torch.Generator().manual_seed(3)

    def store(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
            if any(name.startswith(excluded) for excluded in config["modules_to_not_convert"]):
                continue
            experts, columns, rows = tensors.pop(name).shape
            size = experts, rows, columns // 32
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=draw, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, size, generator=draw, dtype=torch.uint8)

    change_tensors(folder, store)
    change_config(folder, quantization_config=config)


def dequantized(folder: Path) -> PreTrainedModel:
    """Transformers' reading of it, in numbers."""
    config = Mxfp4Config(dequantize=True, modules_to_not_convert=CONFIG["modules_to_not_convert"])
    model: PreTrainedModel = GptOssForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    model.eval()
    return model


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(dequantized(tmp_path), ids)
        (experts,) = {row.workload for row in llm.table.rows if row.family == "experts"}
        assert {row.chosen for row in llm.table.rows if row.family == "experts"} <= {"cpu_native_mxfp4", "reference"}
    assert "float4_e2m1@float8_e8m0fnu:1x32/float32" in experts
    assert expected.std() > 0.1
    assert (got - expected).abs().max() < 2e-4


@pytest.mark.parametrize("parallel", [{}, {"enable_expert_parallel": True}], ids=["tp", "ep"])
def test_two_ranks_compute_what_one_does(tmp_path: Path, parallel: dict[str, Any]) -> None:
    write_gpt_oss(tmp_path, num_key_value_heads=2)
    with small_llm(tmp_path) as llm:
        alone = prompt_scores(llm)
    with ranks_in_threads(tmp_path, 2, **parallel) as llm:
        assert (prompt_scores(llm) - alone).abs().max() < 2e-4


def test_a_layer_whose_experts_are_left_as_they_are(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, CONFIG | {"modules_to_not_convert": ["model.layers.0"]})
    with small_llm(tmp_path) as llm:
        specs = {row.workload for row in llm.table.rows if row.family == "experts"}
    assert len(specs) == 2
    assert sum("float4_e2m1" in spec for spec in specs) == 1


def test_random_weights_are_quantized_while_they_are_made(tmp_path: Path) -> None:
    """As gpt-oss is stored, experts alone: what measurements of its shape take."""
    write_checkpoint(tmp_path, "gpt_oss", sliding_window=9, **SIZES)
    settings = {"load_format": "random", "quantization": "mxfp4", "quantization_options": "layers=experts"}
    with small_llm(tmp_path, **settings) as llm:
        specs = {(row.family, "float4_e2m1" in row.workload) for row in llm.table.rows}
        assert prompt_logits(llm, random_prompts(1, 40, seed=5, shortest=24)[0]).isfinite().all()
    assert ("experts", True) in specs
    assert ("linear", True) not in specs


FIRST = "model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_scales", lambda x: None, r"missing tensors: model.layers.0.mlp.experts.gate_up_proj_scales"),
        ("down_proj_blocks", lambda x: x[..., :8], r"has shape \[4, 64, 2, 8\], the model expects \[4, 64, 2, 16\]"),
        ("down_proj_scales", lambda x: x.float(), r"down_proj_scales' is float32, expected uint8"),
    ],
)
def test_damaged_tensors(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    write_gpt_oss(tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        changed = change(tensors.pop(FIRST + name))
        if changed is not None:
            tensors[FIRST + name] = changed

    change_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)


def test_columns_that_groups_do_not_divide(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt_oss", **(SIZES | {"intermediate_size": 48}))
    change_config(tmp_path, quantization_config=CONFIG)
    with pytest.raises(CheckpointError, match=r"has 48 columns, which groups of 32 do not divide"):
        small_llm(tmp_path)


def test_ranks_that_would_cut_a_group(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, intermediate_size=96, num_key_value_heads=2)
    message = r"blocks of 32, and ranks would have 48 of its 96 columns each, .*--enable-expert-parallel"
    with pytest.raises(ConfigError, match=message), ranks_in_threads(tmp_path, 2):
        pass
