"""Model Optimizer's checkpoints: what names them, which modules they quantize, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint_plugin_api import CheckpointError, ConfigError
from tests.quantization.formats import FORMATS
from tests.quantization.writing import Format, change_config, change_tensors, write_quantized
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

BY_NAME = {form.name: form for form in FORMATS}
IDS = random_prompts(1, 40, seed=5, shortest=24)[0]


def test_a_config_in_its_own_file(tmp_path: Path) -> None:
    """Versions before 0.29 left config.json as it was."""
    model = write_quantized(tmp_path, BY_NAME["modelopt-fp8"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    stored = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": stored["ignore"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    with small_llm(tmp_path) as llm:
        got = prompt_logits(llm, IDS)
    assert (got - reference_logits(model, IDS)).abs().median() < 2e-4


def test_a_cache_alone(tmp_path: Path) -> None:
    """``quant_algo`` null: weights are as they were, and scales of keys and values are read."""
    model = write_checkpoint(tmp_path, "llama")
    quantization = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    change_config(tmp_path, quantization_config=quantization)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, IDS) - reference_logits(model, IDS)).abs().max() < 2e-4


def test_a_damaged_file_of_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: 'quantization' must be an object, got 'FP8'"):
        small_llm(tmp_path)


@pytest.mark.parametrize(("name", "form"), [("modelopt_fp4", "nvfp4"), ("modelopt_mxfp8", "mxfp8")])
def test_a_method_by_the_name_of_its_format(tmp_path: Path, name: str, form: str) -> None:
    write_quantized(tmp_path, BY_NAME[f"modelopt-{form}"])
    with small_llm(tmp_path, quantization=name) as llm:
        assert any("1x" in row.workload for row in llm.table.rows if row.family == "linear")
    change_config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match=r"'quant_algo' must be one of .*, got 'FP8'"):
        small_llm(tmp_path, quantization=name)


def test_a_checkpoint_that_is_not_quantized(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"it reads checkpoints that were quantized by it, .* not quantized; .*mxfp8"):
        small_llm(tmp_path, quantization="modelopt_mxfp8")


def mixed(attention: str, feed_forward: str) -> Format:
    """The attention's modules in one format, those of the feed-forward in another."""
    forms = {"self_attn": BY_NAME[f"modelopt-{attention}"], "mlp": BY_NAME[f"modelopt-{feed_forward}"]}

    def write(name: str, weight: torch.Tensor) -> Any:
        return next(form for part, form in forms.items() if part in name).write(name, weight)

    layers = {
        f"model.layers.{layer}.{part}.{name}_proj": {"quant_algo": forms[part].config["quant_algo"]}
        for layer in range(3)
        for part, names in {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}.items()
        for name in names
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    return Format("mixed", config, write)


def test_modules_in_several_formats(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, mixed("fp8-channel", "mxfp8"))
    with small_llm(tmp_path) as llm:
        got, expected = prompt_logits(llm, IDS), reference_logits(model, IDS)
        specs = {row.workload for row in llm.table.rows if row.family == "linear"}
    assert {"float32:row" in spec for spec in specs if "e4m3" in spec} == {True, False}
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.99


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("form", ["nvfp4", "mxfp8"])
def test_experts(tmp_path: Path, form: str) -> None:
    """NVFP4 is read of experts, too; MXFP8 is not, and says so."""
    model = write_checkpoint(tmp_path, "qwen3_moe", **EXPERTS)  # type: ignore[arg-type]  # sizes
    write = BY_NAME[f"modelopt-{form}"].write

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stored, _ = write(name, tensors.pop(name))
            tensors.update({name.removesuffix("weight") + key: value for key, value in stored.items()})

    change_tensors(tmp_path, quantize)
    change_config(tmp_path, quantization_config=dict(BY_NAME[f"modelopt-{form}"].config))
    if form == "mxfp8":
        with pytest.raises(
            CheckpointError, match=r"experts.0.gate_proj' is an expert in MXFP8, and of this format dense"
        ):
            small_llm(tmp_path)
        return
    with small_llm(tmp_path) as llm:
        got, expected = prompt_logits(llm, IDS), reference_logits(model, IDS)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).median() > 0.9
