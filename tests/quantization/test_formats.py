"""Each format through the engine: the logits of the same model with the numbers that were stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.checkpoint.checkpoint import Checkpoint
from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint_plugin_api import CheckpointError
from tests.quantization.formats import FORMATS
from tests.quantization.writers import ct_config, ct_int8, ct_numbers, fp8_tensor
from tests.quantization.writing import Format, change_config, change_tensors, write_quantized
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

TOLERANCE = 2e-4
"""Of logits of about 5: what the order of sums makes of them in float32."""


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_logits_are_those_of_the_stored_numbers(tmp_path: Path, form: Format) -> None:
    model = write_quantized(tmp_path, form)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
        specs = {row.workload for row in llm.table.rows if row.family == "linear"}
        assert len(specs) > 1, "nothing but the head was quantized"
    if form.inputs is None:
        assert (got - expected).abs().max() < TOLERANCE
        return
    # An activation at the border of two elements may be rounded to either; the rest agrees.
    assert (got - expected).abs().median() < TOLERANCE
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.995


@pytest.mark.parametrize("form", [f for f in FORMATS if f.name in ("gptq-4", "awq", "ct-w4a16")], ids=str)
def test_greedy_tokens(tmp_path: Path, form: Format) -> None:
    model = write_quantized(tmp_path, form, "llama")
    prompts = random_prompts(4, 30, seed=1)
    with small_llm(tmp_path) as llm:
        from hardpoint import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)


FROZEN = ct_config("naive-quantized", ct_numbers(8, "float", "tensor"), None, quantization_status="frozen")


def test_frozen_weights_may_be_compressed(tmp_path: Path) -> None:
    """As nm-testing/Meta-Llama-3.1-8B-Instruct-FP8-hf says of itself; weights that are not are refused."""
    model = write_quantized(tmp_path, Format("frozen", FROZEN, fp8_tensor), "llama")
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, ids) - reference_logits(model, ids)).abs().max() < TOLERANCE
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].float()}))
    with pytest.raises(CheckpointError, match=r"up_proj.weight' is float32, expected float8_e4m3fn"):
        small_llm(tmp_path)


def test_gptq_with_modules_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: the first pattern that matches counts."""
    four, eight = (next(f for f in FORMATS if f.name == name) for name in ("gptq-4", "gptq-8-asymmetric"))
    rules = {
        r"-:.*\.0\.mlp\..*": {},
        r".*\.mlp\.down_proj": {"bits": 8, "group_size": -1, "sym": False},
        r"+:.*\.mlp\.down_proj": {"bits": 2},
    }

    def write(name: str, weight: torch.Tensor) -> Any:
        if ".0.mlp." in name:
            return {"weight": weight}, weight
        return (eight if "mlp.down_proj" in name else four).write(name, weight)

    model = write_quantized(tmp_path, Format("dynamic", {**four.config, "dynamic": rules}, write))
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, ids) - reference_logits(model, ids)).abs().max() < TOLERANCE
        specs = {row.workload for row in llm.table.rows if row.family == "linear"}
    assert {spec for spec in ("uint8@", "int4@") if any(spec in row for row in specs)} == {"uint8@", "int4@"}


FOUR_BIT_FLOATS = {
    "mxfp4": ct_config("mxfp4-pack-quantized", ct_numbers(4, "float", "group", group_size=32), None),
    "nvfp4": ct_config("nvfp4-pack-quantized", ct_numbers(4, "float", "tensor_group", group_size=16), None),
}


@pytest.mark.parametrize("form", FOUR_BIT_FLOATS)
def test_experts_in_four_bit_floats(tmp_path: Path, form: str) -> None:
    """Each matrix of each expert has scales of its own; routers have none."""
    model = write_checkpoint(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    write = {f.name: f.write for f in FORMATS}[f"ct-{form}a16"]
    numbers = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stored, numbers[name] = write(name, tensors.pop(name))
            tensors.update({name.replace("weight", key, 1): value for key, value in stored.items()})

    change_tensors(tmp_path, quantize)
    change_config(tmp_path, quantization_config=FOUR_BIT_FLOATS[form])
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        expert = name.replace("gate_up_proj", "{}.{}_proj.weight").replace(
            "experts.down_proj", "experts.{}.{}_proj.weight"
        )
        if ".experts." in name:
            parts = ("gate", "up") if "gate_up" in name else ("down",)
            stack = [torch.cat([numbers[expert.format(e, part)] for part in parts]) for e in range(4)]
            weight.data = torch.stack(stack)
        elif name in numbers:
            weight.data = numbers[name]
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("ignore", [["lm_head"], ["lm_head", "re:.*mlp.gate$"]], ids=str)
def test_a_router_that_nobody_quantized(tmp_path: Path, ignore: list[str]) -> None:
    """llmcompressor under Transformers 5 does not list routers in ``ignore``."""
    model = write_checkpoint(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stored, _ = ct_int8(name, tensors.pop(name))
            tensors.update({name.replace("weight", key): value for key, value in stored.items()})

    change_tensors(tmp_path, quantize)
    config = ct_config("int-quantized", ct_numbers(8, "int", "channel"), None, ignore=ignore)
    change_config(tmp_path, quantization_config=config)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.99


@pytest.mark.parametrize(
    "targets",
    [(["Linear"], ["Linear"]), (["re:.*proj"], ["re:.*layers"]), (["re:.*proj"], ["Linear"])],
    ids=["the last of equal targets", "the first pattern by alphabet", "a pattern before the class"],
)
def test_the_group_that_counts(tmp_path: Path, targets: tuple[list[str], list[str]]) -> None:
    """Where a module is a target of several, as compressed-tensors chose when it wrote the weights."""
    numbers = ct_numbers(8, "int", "channel")
    config = ct_config("int-quantized", numbers, None)
    (group,) = config["config_groups"].values()
    rounded = {**group, "input_activations": ct_numbers(8, "int", "token", dynamic=True)}
    first, second = ({**one, "targets": names} for one, names in zip((group, rounded), targets, strict=True))
    config["config_groups"] = {"group_0": first, "group_1": second}
    write_quantized(tmp_path, Format("two groups", config, ct_int8))
    with small_llm(tmp_path) as llm:
        modules: dict[str, Any] = dict(llm.core.blueprint.model.named_modules())
    found = {m.scheme.activation.element for m in modules.values() if getattr(m, "scheme", None) is not None}
    assert found - {"float32"} == (set() if targets[1] == ["Linear"] != targets[0] else {"int8"})


def test_groups_of_columns_that_were_never_set(tmp_path: Path) -> None:
    """-1 in all of compressed-tensors' ``weight_g_idx``: columns are in order."""
    form = next(form for form in FORMATS if form.name == "ct-w4a16")
    model = write_quantized(tmp_path, form)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    change_config(tmp_path, quantization_config=config)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_shape")]:
            columns = int(tensors[name][1])
            tensors[name.replace("weight_shape", "weight_g_idx")] = torch.full((columns,), -1, dtype=torch.int32)

    change_tensors(tmp_path, add)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, ids) - reference_logits(model, ids)).abs().max() < TOLERANCE


def test_the_second_version_of_gptq_by_its_other_key(tmp_path: Path) -> None:
    """GPTQModel says ``format`` beside ``checkpoint_format``: zero points are not one less."""
    form = next(form for form in FORMATS if form.name == "gptq-4-v2")
    model = write_quantized(tmp_path, form)
    config = {key: value for key, value in form.config.items() if key != "checkpoint_format"}
    change_config(tmp_path, quantization_config={**config, "format": "gptq_v2"})
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, ids) - reference_logits(model, ids)).abs().max() < TOLERANCE


def test_a_config_within_that_of_the_text_model(tmp_path: Path) -> None:
    form = next(form for form in FORMATS if form.name == "ct-int8")
    config = dict(form.config)
    found = Checkpoint(HFConfig(tmp_path, {"text_config": {"quantization_config": config}})).quantization_config
    assert found == config
