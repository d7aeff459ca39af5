"""Layers whose parts are one quantized tensor of the checkpoint: Phi-3's, and those of layers with a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint_plugin_api import CheckpointError, ConfigError
from tests.quantization.formats import FORMATS, write_quantized
from tests.support.checkpoints import BAMBA, GATED_DELTA, random_prompts, reference_logits
from tests.support.engines import prompt_logits, small_llm

BY_NAME = {form.name: form for form in FORMATS}
MAMBA: dict[str, Any] = BAMBA | {"mamba_d_state": 32}
HYBRID: dict[str, Any] = GATED_DELTA | {"linear_value_head_dim": 16}


@pytest.mark.parametrize("form", ["fp8-channel", "fp8-block", "gptq-4-desc-act", "awq", "ct-w4a16", "modelopt-nvfp4"])
def test_parts_of_one_tensor(tmp_path: Path, form: str) -> None:
    model = write_quantized(tmp_path, BY_NAME[form], "phi3")
    check(tmp_path, model)


@pytest.mark.parametrize("form", ["fp8-block", "ct-fp8", "modelopt-nvfp4"])
def test_gated_delta_nets(tmp_path: Path, form: str) -> None:
    model = write_quantized(tmp_path, BY_NAME[form], "qwen3_5", **HYBRID)
    check(tmp_path, model)


@pytest.mark.parametrize("form", ["fp8-tensor", "gptq-4"])
def test_mamba(tmp_path: Path, form: str) -> None:
    model = write_quantized(tmp_path, BY_NAME[form], "bamba", **MAMBA)
    check(tmp_path, model)


def check(folder: Path, model: Any) -> None:
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(folder) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
        specs = {row.workload for row in llm.table.rows if row.family == "linear"}
        assert len(specs) > 2, "too little was quantized"
    assert (got - expected).abs().median() < 2e-4
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.995


def test_ranks_cannot_divide_it(tmp_path: Path) -> None:
    write_quantized(tmp_path, BY_NAME["fp8-channel"], "phi3")
    with pytest.raises(ConfigError, match=r"q, k, v of layer 'stack\.blocks\.0\.mixer\.qkv' in one quantized tensor"):
        small_llm(tmp_path, tensor_parallel_size=2)


def test_a_block_of_two_parts(tmp_path: Path) -> None:
    write_quantized(tmp_path, BY_NAME["fp8-block-apart"], "phi3")
    with pytest.raises(CheckpointError, match=r"blocks of rows that reach from one of its parts \(q 64"):
        small_llm(tmp_path)
