"""Layers whose parts are one quantized tensor of the checkpoint: Phi-3's, and those of layers with a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM
from hardpoint.layers.linear import Linear
from hardpoint_plugin_api import CheckpointError
from tests.quantization.formats import FORMATS
from tests.quantization.test_online import int8
from tests.quantization.turning import TURNS, turning
from tests.quantization.writing import round_weights, write_quantized
from tests.support.checkpoints import BAMBA, GATED_DELTA, random_prompts, reference_logits, write_checkpoint
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


@pytest.mark.parametrize(
    "form",
    [
        "fp8-channel",
        "fp8-block",
        "gptq-4",
        "awq",
        "ct-w4a16",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                *("fp8-tensor", "fp8-static", "gptq-4-desc-act", "gptq-8-asymmetric", "awq-gemv", "ct-fp8", "ct-nvfp4"),
                *("ct-int8-asymmetric", "ct-mxfp4", "ct-w4a16-actorder", "modelopt-fp8", "modelopt-nvfp4"),
            )
        ),
    ],
)
def test_parts_that_take_turns(tmp_path: Path, form: str) -> None:
    """Qwen3-Next's projections hold rows of several matrices, key head by key head, and so do their scales."""
    model = write_quantized(tmp_path, turning(BY_NAME[form]), "qwen3_next", **TURNS)
    check(tmp_path, model)
    with small_llm(tmp_path) as llm:
        assert turned(llm) == [True, True, form != "fp8-block"]


def is_quantized(layer: torch.nn.Module) -> bool:
    assert isinstance(layer, Linear)
    return layer.scheme is not None and not layer.scheme.weight.is_plain


def test_blocks_that_reach_beyond_a_turn(tmp_path: Path) -> None:
    write_quantized(tmp_path, BY_NAME["fp8-block"], "qwen3_next", **TURNS)
    with pytest.raises(CheckpointError, match=r"in_proj_ba' holds .* in 2 groups of 2 \+ 2, and .* blocks of 32 rows"):
        small_llm(tmp_path)


def test_parts_that_take_turns_are_quantized_while_they_load(tmp_path: Path) -> None:
    """Logits are those of the rounded numbers; where blocks reach beyond a turn, a matrix is left as it is."""
    model = write_checkpoint(tmp_path, "qwen3_next", **TURNS)
    round_weights(model, int8, None)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path, quantization="int8", quantization_options="activations=none") as llm:
        assert (prompt_logits(llm, ids) - reference_logits(model, ids)).abs().max() < 2e-4
        assert turned(llm) == [True, True, True]
    with small_llm(tmp_path, quantization="fp8", quantization_options="scales=block") as llm:
        assert turned(llm) == [False, False, False]
        assert is_quantized(llm.core.blueprint.model.get_submodule("stack.blocks.0.mixer.out"))


def turned(llm: LLM) -> list[bool]:
    """Whether each of the layers whose rows take turns is quantized."""
    mixer = llm.core.blueprint.model.get_submodule("stack.blocks.0.mixer")
    return [is_quantized(mixer.get_submodule(name)) for name in ("qkv", "z", "ba")]


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


def test_a_block_of_two_parts(tmp_path: Path) -> None:
    write_quantized(tmp_path, BY_NAME["fp8-block-apart"], "phi3")
    with pytest.raises(CheckpointError, match=r"blocks of rows that reach from one of its parts \(q 64"):
        small_llm(tmp_path)
