"""Missing and contradictory parts of a quantized checkpoint: one clear error each, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.checkpoint import safetensors_files
from hardpoint.quantization.methods.online import Int8Online
from hardpoint_plugin_api import (
    CheckpointError,
    ConfigError,
    HardpointError,
    QuantSpec,
    Scale,
    SelectionError,
    UnknownNameError,
)
from tests.quantization.formats import FORMATS
from tests.quantization.writers import ct_config, ct_numbers
from tests.quantization.writing import change_config, change_tensors, write_quantized
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm

BY_NAME = {form.name: form for form in FORMATS}
MODULE = "model.layers.1.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


def drop(name: str) -> Callable[[Tensors], object]:
    """Take a tensor of one module away."""
    return lambda tensors: tensors.pop(f"{MODULE}.{name}")


def shape(name: str, *size: int) -> Callable[[Tensors], object]:
    """Give a tensor of one module another shape."""

    def change(tensors: Tensors) -> None:
        tensors[f"{MODULE}.{name}"] = torch.zeros(size, dtype=tensors[f"{MODULE}.{name}"].dtype)

    return change


def less(name: str) -> Callable[[Tensors], object]:
    """Subtract one from a tensor of one module."""
    return lambda tensors: tensors[f"{MODULE}.{name}"].sub_(1)


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the checkpoint is streamed: by then, weights are being read."""

    def fail(self: Any) -> Any:
        raise AssertionError("weights were read before the error was found")

    monkeypatch.setattr(safetensors_files.SafetensorsFiles, "__iter__", fail)


TENSORS = [
    (
        "fp8-tensor",
        drop("weight_scale"),
        r"up_proj.weight_scale' is missing, and its weight is stored in an 8-bit float",
    ),
    (
        "fp8-tensor",
        shape("weight_scale", 3),
        r"weight_scale' has shape \[3\], expected \[96\] or .* for a weight of 96 x",
    ),
    ("fp8-block", shape("weight_scale_inv", 2, 2), r"weight_scale_inv' has shape \[2, 2\], expected \[3, 2\]"),
    ("fp8-static", drop("input_scale"), r"input_scale' .* is missing, and activation_scheme is static"),
    ("fp8-static", shape("input_scale", 3), r"input_scale' has shape \[3\], expected one number"),
    ("gptq-4", drop("qzeros"), r"missing tensors: model.layers.1.mlp.up_proj.qzeros"),
    ("gptq-4", shape("scales", 1, 96), r"up_proj.scales' has shape \[1, 96\], the model expects \[2, 96\]"),
    ("gptq-8", drop("g_idx"), r"up_proj.g_idx' is missing, and desc_act is set"),
    ("awq", drop("scales"), r"missing tensors: model.layers.1.mlp.up_proj.scales"),
    ("awq", shape("qweight", 64, 11), r"up_proj.qweight' has shape \[64, 11\], the model expects \[64, 12\]"),
    ("ct-int8", drop("weight_scale"), r"missing tensors: model.layers.1.mlp.up_proj.weight_scale"),
    ("ct-w4a16", shape("weight_scale", 96, 2), r"weight_scale' has shape \[96, 2\], the model expects \[96, 4\]"),
    ("ct-w4a16", drop("weight_packed"), r"missing tensors: model.layers.1.mlp.up_proj.weight_packed"),
    ("ct-w4a16-actorder", drop("weight_g_idx"), r"weight_g_idx' is missing, and actorder is set"),
    ("ct-w4a16-actorder", less("weight_g_idx"), r"up_proj.weight_g_idx' has groups from -1 to .* from 0 to"),
    ("gptq-8", less("g_idx"), r"up_proj.g_idx' has groups from -1 to .* quantize the model again"),
    ("modelopt-fp8", drop("input_scale"), r"input_scale' is missing, and quant_algo is FP8"),
    ("modelopt-nvfp4", drop("input_scale"), r"input_scale' is missing, and quant_algo is NVFP4"),
    ("modelopt-nvfp4", drop("weight_scale_2"), r"missing tensors: model.layers.1.mlp.up_proj.weight_scale_2"),
    ("modelopt-mxfp8", shape("weight_scale", 192), r"weight_scale' has shape \[192\], expected two axes: rows, and"),
    ("modelopt-mxfp8", shape("weight_scale", 96, 3), r"weight_scale' has shape \[96, 3\], the model expects \[96, 2\]"),
    ("ct-nvfp4", drop("weight_global_scale"), r"missing tensors: model.layers.1.mlp.up_proj.weight_global_scale"),
    ("ct-nvfp4", drop("input_global_scale"), r"input_global_scale' is missing, and activations have 4 bits"),
    ("ct-nvfp4", shape("weight_packed", 96, 31), r"weight_packed' has shape \[96, 31\], the model expects \[96, 32\]"),
    ("ct-mxfp4", shape("weight_scale", 96, 4), r"weight_scale' has shape \[96, 4\], the model expects \[96, 2\]"),
]


@pytest.mark.parametrize(("form", "change", "message"), TENSORS, ids=lambda value: value if type(value) is str else "")
def test_tensors(
    tmp_path: Path, no_reading: None, form: str, change: Callable[[Tensors], object], message: str
) -> None:
    write_quantized(tmp_path, BY_NAME[form])
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)


CONFIGS = [
    (
        {"quant_method": "fp9"},
        UnknownNameError,
        r"unknown quantization method 'fp9'; did you mean 'fp8'\?.*config.json",
    ),
    (
        {"quant_method": "fp8_online"},
        UnknownNameError,
        r"'fp8_online'; .*nown: awq, bitsandbytes, compressed-tensors, fp8, gguf, gptq, .*mxfp4, quark, torchao\.",
    ),
    (
        {"quant_method": "fp8", "activation_scheme": "none"},
        CheckpointError,
        r"'activation_scheme' must be one of dynamic",
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128]},
        CheckpointError,
        r"'weight_block_size' must be a list of two",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        CheckpointError,
        r"'quant_algo' must be one of FP8, .*, got 'W4A8_AWQ'",
    ),
    ({"quant_method": "modelopt"}, CheckpointError, r"'quant_algo' is missing"),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        CheckpointError,
        r"'quantized_layers' must say how each module is quantized",
    ),
    ({"quant_method": "gptq", "bits": 5}, CheckpointError, r"'bits' must be one of 2, 3, 4, 8, got 5"),
    ({"quant_method": "gptq"}, CheckpointError, r"'bits' is missing"),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "marlin"},
        CheckpointError,
        r"'format' must be one of gptq, gptq_v2, got 'marlin'",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:*x": {}}},
        CheckpointError,
        r"'dynamic' holds '\*x', which is no regular expression \(nothing to repeat",
    ),
    (
        ct_config("int-quantized", ct_numbers(8, "int", "channel"), None, ignore=["re:*head"]),
        CheckpointError,
        r"config.json: quantization_config: 'ignore' holds '\*head', which is no regular expression",
    ),
    ({"quant_method": "awq", "bits": 4, "version": "marlin"}, CheckpointError, r"'version' must be one of gemm"),
    (
        ct_config("marlin-24", ct_numbers(4, "int", "channel"), None),
        CheckpointError,
        r"group_0: weights: the format 'marlin-24' is not supported; supported: pack-quantized",
    ),
    (
        ct_config("nvfp4-pack-quantized", ct_numbers(4, "int", "channel"), None),
        CheckpointError,
        r"group_0: weights: 'type' must be one of float, got 'int'",
    ),
    (
        ct_config("mxfp4-pack-quantized", ct_numbers(4, "float", "group", group_size=16), None),
        CheckpointError,
        r"group_0: weights: 'group_size' must be one of 32, got 16",
    ),
    (
        ct_config(
            "nvfp4-pack-quantized",
            ct_numbers(4, "float", "tensor_group", group_size=16),
            ct_numbers(4, "float", "tensor_group", group_size=16, dynamic=True),
        ),
        CheckpointError,
        r"input_activations: 'dynamic' does not go with strategy 'tensor_group' of activations, got True",
    ),
    (
        ct_config(
            "int-quantized", ct_numbers(8, "int", "channel"), None, transform_config={"config_groups": {"R1": {}}}
        ),
        CheckpointError,
        r"transform_config: 'config_groups' must be empty: rotations of weights are not supported",
    ),
    (
        ct_config("int-quantized", ct_numbers(8, "int", "channel"), ct_numbers(8, "int", "token")),
        CheckpointError,
        r"input_activations: 'dynamic' does not go with strategy 'token' of activations, got False",
    ),
]


@pytest.mark.parametrize(("config", "kind", "message"), CONFIGS)
def test_configs(
    tmp_path: Path, no_reading: None, config: dict[str, Any], kind: type[HardpointError], message: str
) -> None:
    write_quantized(tmp_path, BY_NAME["fp8-tensor"])
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(kind, match=message):
        small_llm(tmp_path)


def test_a_checkpoint_that_does_not_say_how_it_is_quantized(tmp_path: Path, no_reading: None) -> None:
    """As where a tool left its settings in a file of its own (``quantize_config.json``)."""
    write_quantized(tmp_path, BY_NAME["gptq-4"])
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"no place for: .*qweight.*; quantized weights need a quantization meth"):
        small_llm(tmp_path)


FLAGS = [
    (
        "fp9",
        "",
        UnknownNameError,
        r"unknown quantization method 'fp9'; did you mean 'fp8'\?.*Asked for by --quantization",
    ),
    (
        "gptq",
        "",
        ConfigError,
        r"--quantization gptq: .* is not quantized; methods that quantize while loading: fp8, int4",
    ),
    ("int4", "size=3", UnknownNameError, r"unknown quantization option 'size'"),
    ("int4", "group_size=0", ConfigError, r"group_size=0: must be a positive whole number"),
    (
        "int4",
        "group_size=48",
        ConfigError,
        r"groups of 48 do not divide the 64 columns of 'model.layers.0.self_attn.q_",
    ),
    ("int8", "activations=some", ConfigError, r"activations=some: must be one of dynamic, none"),
    (
        None,
        "group_size=16",
        ConfigError,
        r"--quantization-options group_size=16: only weights .*; add --quantization METHOD",
    ),
]


@pytest.mark.parametrize(("method", "options", "kind", "message"), FLAGS)
def test_flags(
    tmp_path: Path, no_reading: None, method: str | None, options: str, kind: type[HardpointError], message: str
) -> None:
    write_checkpoint(tmp_path, "qwen2")
    with pytest.raises(kind, match=message):
        small_llm(tmp_path, quantization=method, quantization_options=options)


def test_a_head_that_is_the_embedding(tmp_path: Path, no_reading: None) -> None:
    write_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head=true: the output head of .*config.json is the embedding"):
        small_llm(tmp_path, quantization="int8", quantization_options="lm_head=true")
    with pytest.raises(ConfigError, match=r"lm_head=int8: the output head of .*config.json is the embedding"):
        small_llm(tmp_path, quantization="int4", quantization_options="group_size=32,lm_head=int8")


def test_a_flag_that_contradicts_the_checkpoint(tmp_path: Path, no_reading: None) -> None:
    write_quantized(tmp_path, BY_NAME["fp8-tensor"])
    with pytest.raises(ConfigError, match=r"--quantization int8 contradicts .*config.json"):
        small_llm(tmp_path, quantization="int8")


def test_symmetric_weights_with_other_zero_points(tmp_path: Path) -> None:
    """An error that only the tensors' bytes show is raised as they are read, and names the tensor."""
    write_quantized(tmp_path, BY_NAME["gptq-4"])
    change_tensors(tmp_path, lambda tensors: tensors[f"{MODULE}.qzeros"].add_(1))
    with pytest.raises(CheckpointError, match=r"up_proj.qzeros': zero points are not all 8, and the config says"):
        small_llm(tmp_path)


@pytest.mark.parametrize(("family", "kernels", "part"), [("qwen3", "linear", "mlp"), ("mixtral", "experts", "experts")])
def test_elements_that_nothing_can_read(
    tmp_path: Path, no_reading: None, monkeypatch: pytest.MonkeyPatch, family: str, kernels: str, part: str
) -> None:
    """A plugin's method may know formats for which this device has no kernel, and that the emulation does not know."""
    unknown = QuantSpec("float6_e3m2", scales=(Scale("float32", (1, -1)),))
    known = Int8Online.specs
    monkeypatch.setattr(
        Int8Online, "specs", lambda self, m: (unknown, self.plain) if part in m.name else known(self, m)
    )
    write_checkpoint(tmp_path, family)
    with pytest.raises(SelectionError, match=rf"nothing can serve {kernels} \(.*float6_e3m2.*\) on ") as caught:
        small_llm(tmp_path, quantization="int8")
    reasons = caught.value.rejected
    assert all(reasons.values()), "every kernel says why not"
    (emulation,) = (r for name in ("emulated", "reference") for r in reasons.get(name, []) if r.code == "spec")
    assert (emulation.wanted, "int8" in str(emulation.supported)) == ("float6_e3m2", True)


def test_experts_that_stand_in_one_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    change_config(tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    message = r"hold all experts in one tensor, .* 'fp8' reads one matrix at a time; run it without quantization"
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)


@pytest.mark.parametrize(("method", "group"), [("mxfp4", 32), ("nvfp4", 16)])
def test_columns_that_groups_do_not_divide(tmp_path: Path, method: str, group: int) -> None:
    write_checkpoint(tmp_path, "llama", intermediate_size=72)
    message = rf"--quantization {method}: groups of {group} do not divide the 72 columns of .*down_proj'; take "
    with pytest.raises(ConfigError, match=message):
        small_llm(tmp_path, quantization=method)


def test_experts_with_columns_that_groups_do_not_divide(tmp_path: Path) -> None:
    """Two values share a byte, and 32 a scale: an odd size is refused, not padded."""
    write_checkpoint(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=33)
    numbers = ct_numbers(4, "float", "group", group_size=32)
    change_config(tmp_path, quantization_config=ct_config("mxfp4-pack-quantized", numbers, None))
    with pytest.raises(CheckpointError, match=r"down_proj' has 33 columns, which groups of 32 do not divide"):
        small_llm(tmp_path)
