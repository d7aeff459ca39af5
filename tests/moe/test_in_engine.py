"""Mixtures of experts in whole engines: who serves them and why, how checkpoints hold them, quantized, divided."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.layers import MoE
from hardpoint.quantization.methods.online import Int8Online
from hardpoint_plugin_api import (
    CheckpointError,
    ConfigError,
    HardpointError,
    Module,
    QuantSpec,
    Scale,
    SelectionError,
    UnknownNameError,
)
from tests.parallel.ranks import ThreadsExecutor, ranks_in_threads
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL_MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def write_mixture(folder: Path, family: str = "qwen2_moe", **changes: Any) -> PreTrainedModel:
    return write_checkpoint(folder, family, **(SMALL_MIXTURE | changes))


def check_logits(llm: LLM, model: PreTrainedModel, tolerance: float = 1e-4) -> None:
    (prompt,) = random_prompts(1, 40, seed=1, shortest=40)
    assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < tolerance


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change a checkpoint's tensors."""
    file = folder / "model.safetensors"
    tensors = {name: x.contiguous() for name, x in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def chosen(llm: LLM) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in llm.table.rows:
        found.setdefault(row.family, set()).add(row.chosen)
    return found


def table_rows(llm: LLM) -> list[dict[str, Any]]:
    """The table of selections, as ``explain --json`` prints it."""
    return cast("list[dict[str, Any]]", llm.table.to_json()["rows"])


def mixture_of(model: Any, layer: int) -> MoE:
    """A layer's mixture."""
    found = model.stack.blocks[str(layer)].feed_forward
    assert isinstance(found, MoE)
    return found


# Selection


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, write_mixture(folder)


@pytest.mark.parametrize(
    ("settings", "experts", "all2all"),
    [
        ({}, "cpu_native", "local"),
        ({"deny": "experts=cpu_native"}, "grouped", "local"),
        ({"experts_backend": "reference"}, "reference", "local"),
        ({"use": {"experts": "batch_invariant"}}, "batch_invariant", "local"),
        ({"all2all_backend": "local_batches"}, "batched", "local_batches"),
        ({"batch_invariant": True}, "cpu_native", "local"),
        ({"batch_invariant": True, "deny": "experts=cpu_native"}, "batch_invariant", "local"),
    ],
    ids=str,
)
def test_every_way_to_choose(
    mixture: tuple[Path, PreTrainedModel], settings: dict[str, Any], experts: str, all2all: str
) -> None:
    folder, model = mixture
    with small_llm(folder, **settings) as llm:
        assert (chosen(llm)["experts"], chosen(llm)["all2all"]) == ({experts}, {all2all})
        check_logits(llm, model)


@pytest.mark.parametrize(
    ("deny", "experts"),
    [
        ("", {name: ["layout"] for name in ("grouped", "reference", "batch_invariant")}),
        (
            "experts=cpu_native",
            {"cpu_native": ["denied"], **{name: ["comes-after"] for name in ("reference", "batch_invariant")}},
        ),
    ],
    ids=["compiled", "without-compiled"],
)
def test_explain_says_why_not_the_others(
    mixture: tuple[Path, PreTrainedModel], deny: str, experts: dict[str, list[str]]
) -> None:
    with small_llm(mixture[0], deny=deny) as llm:
        rows = {row["family"]: row for row in table_rows(llm) if row["family"] in ("experts", "all2all")}
    reasons = {
        family: {
            loser["name"]: codes
            for loser in row["rejected"]
            if "platform"
            not in (codes := [reason["code"] for reason in loser["reasons"]])  # what others' plugins offer
        }
        for family, row in rows.items()
    }
    assert reasons["experts"] == {
        "batched": ["format"],
        "cpu_native_int8": ["spec"],
        "cpu_native_int4": ["spec"],
        "cpu_native_mxfp4": ["spec"],
        "cpu_native_nvfp4": ["spec"],
        "cpu_native_blocks": ["spec"],
        **experts,
    }
    assert reasons["all2all"] == {
        "local_batches": ["comes-after"],
        "cpu_shared_memory": ["parallel"],
        **{name: ["parallel"] for name in ("replicated", "allgather_reducescatter", "all_to_all", "naive")},
    }


@pytest.mark.parametrize(
    ("settings", "error", "what"),
    [
        ({"experts_backend": "groupd"}, UnknownNameError, "did you mean 'grouped'"),
        (
            {"experts_backend": "batched"},
            SelectionError,
            r"format not supported \(wanted standard, supported batched\)",
        ),
        ({"all2all_backend": "naive"}, SelectionError, r"parallel not supported \(wanted none, supported ep, tp\+ep\)"),
        ({"experts_backend": "grouped", "quantization": "int8"}, SelectionError, "quantization specs not supported"),
        ({"experts_backend": "grouped", "batch_invariant": True}, SelectionError, "batch_invariant not supported"),
    ],
    ids=str,
)
def test_what_was_asked_for_and_cannot_serve(
    mixture: tuple[Path, PreTrainedModel], settings: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        small_llm(mixture[0], **settings)


def test_widths_that_the_quick_kernel_does_not_take_go_to_the_next(tmp_path: Path) -> None:
    model = write_mixture(tmp_path, "qwen3_moe", moe_intermediate_size=30)
    model.set_experts_implementation("eager")  # Transformers takes grouped_mm whatever the width
    with small_llm(tmp_path) as llm:
        assert chosen(llm)["experts"] == {"cpu_native"}, "panels take any width"
        check_logits(llm, model)
    with small_llm(tmp_path, deny="experts=cpu_native") as llm:
        assert chosen(llm)["experts"] == {"reference"}
        (row,) = [row for row in table_rows(llm) if row["family"] == "experts"]
        (grouped,) = [loser for loser in row["rejected"] if loser["name"] == "grouped"]
        assert [reason["code"] for reason in grouped["reasons"]] == ["shape"]
        check_logits(llm, model)


@pytest.mark.parametrize("experts", ["cpu_native", "batch_invariant"])
def test_tokens_do_not_depend_on_the_batch(mixture: tuple[Path, PreTrainedModel], experts: str) -> None:
    prompts = random_prompts(6, 30, seed=4)
    scored = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    settings = {"batch_invariant": True, "experts_backend": experts}
    with small_llm(mixture[0], max_num_batched_tokens=24, **settings) as llm:
        together = llm.generate(prompts, scored, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            (alone,) = llm.generate([prompt], scored, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_a_step_beyond_what_scratch_memory_is_for_runs_in_parts(tmp_path: Path) -> None:
    """As where steps are padded to more tokens than requests may fill."""
    model = write_mixture(tmp_path)
    with small_llm(tmp_path, all2all_backend="local_batches") as llm:
        for layer in range(2):
            mixture_of(llm.core.blueprint.model, layer).experts._most_tokens = 16
        check_logits(llm, model)


# Checkpoints


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts in one tensor, as Transformers 5 holds them in memory."""
    experts = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
    kinds = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    rest = {}
    for name, x in tensors.items():
        if match := experts.fullmatch(name):
            layer, number, matrix = match.groups()
            found.setdefault(layer, {}).setdefault(kinds[matrix], {})[int(number)] = x
        else:
            rest[name.replace("block_sparse_moe", "mlp")] = x
    for layer, parts in found.items():
        gate, up, down = (torch.stack([parts[kind][e] for e in sorted(parts[kind])]) for kind in ("gate", "up", "down"))
        rest |= {f"{layer}.mlp.experts.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.mlp.experts.down_proj": down}
    return rest


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_experts_in_one_tensor(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_local_experts": 4} if family == "mixtral" else {}
    model = write_mixture(tmp_path, family, **changes)
    rewrite(tmp_path, fused)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())
    with small_llm(tmp_path) as llm:
        check_logits(llm, model)


def test_weights_are_replaced_by_those_of_a_model_in_memory(mixture: tuple[Path, PreTrainedModel]) -> None:
    _, other = mixture
    with small_llm(mixture[0]) as llm:
        changed = {name: x * 0.9 for name, x in other.state_dict().items()}
        other_model = type(other)(other.config).eval()
        other_model.load_state_dict(changed)
        llm.update_weights(changed.items())
        check_logits(llm, other_model)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda t: {n: x for n, x in t.items() if "layers.1.mlp.experts.2.up_proj" not in n},
            r"missing tensors: model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight$",
        ),
        (
            lambda t: t | {"model.layers.0.mlp.experts.4.up_proj.weight": torch.zeros(32, 64)},
            r"no place for: model\.layers\.0\.mlp\.experts\.4\.up_proj\.weight",
        ),
        (
            lambda t: t | {"model.layers.0.mlp.experts.3.down_proj.weight": torch.zeros(64, 33)},
            r"experts\.3\.down_proj\.weight' has shape \[64, 33\], the model expects \[64, 32\]",
        ),
        (
            lambda t: fused(t) | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(3, 64, 64)},
            r"gate_up_proj' has shape \[3, 64, 64\], the model expects \[4, 64, 64\]",
        ),
        (
            lambda t: t | {"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 64, 32)},
            "is there twice",
        ),
    ],
    ids=["missing", "extra", "shape", "fused-shape", "twice"],
)
def test_wrong_tensors_are_named(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], what: str, tmp_path: Path
) -> None:
    write_mixture(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=what):
        small_llm(tmp_path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_experts_per_tok": 5}, "'num_experts_per_tok' must be at most the number of experts, got 5 of 4"),
        ({"num_experts": None}, "'num_experts' must be a positive whole number, got None|'num_experts' is missing"),
        ({"mlp_only_layers": [-1]}, "'mlp_only_layers' must be a list of whole numbers"),
        ({"mlp_only_layers": 1}, "'mlp_only_layers' must be a list of whole numbers"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be a positive whole number"),
        ({"norm_topk_prob": "yes"}, "'norm_topk_prob' must be true or false"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
    ids=str,
)
def test_wrong_configs(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    write_mixture(tmp_path)
    set_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=what):
        small_llm(tmp_path)


def test_both_keys_for_the_number_of_experts(tmp_path: Path) -> None:
    model = write_mixture(tmp_path, "qwen3_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    number = config.pop("num_local_experts", None) or config.pop("num_experts")
    for key, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        set_config(tmp_path, **{key: number, other: None})
        with small_llm(tmp_path) as llm:
            check_logits(llm, model)


def test_windows_of_configs_without_layer_types(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 3,
        "num_hidden_layers": 4,
    }
    model = write_mixture(tmp_path, **changes)
    set_config(tmp_path, layer_types=None)
    with small_llm(tmp_path) as llm:
        check_logits(llm, model)


# Quantized

FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def quantized_fp8(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts with one scale for each matrix, as AutoFP8 writes them; and what they mean."""
    stored, numbers = {}, {}
    for name, x in tensors.items():
        if ".experts." not in name:
            stored[name] = x
            continue
        scale = x.abs().max() / 448
        stored[name] = (x / scale).to(torch.float8_e4m3fn)
        stored[name.replace(".weight", ".weight_scale")] = scale
        numbers[name] = stored[name].float() * scale
    return stored, numbers


def loaded_experts(llm: LLM, layer: int) -> dict[str, Tensor]:
    """The matrices of a layer as an engine's kernel unpacks them."""
    experts = mixture_of(llm.core.blueprint.model, layer).experts
    unpacked: dict[str, Tensor] = experts.kernels[0].unpack(experts.weights)
    return unpacked


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    model = write_mixture(tmp_path, "qwen3_moe")
    numbers: dict[str, Tensor] = {}

    def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored, meant = quantized_fp8(tensors)
        numbers.update(meant)
        return stored

    rewrite(tmp_path, quantize)
    set_config(tmp_path, quantization_config=FP8_CONFIG)
    with small_llm(tmp_path) as llm:
        assert chosen(llm)["experts"] == {"reference"}
        for layer in range(2):
            matrices = loaded_experts(llm, layer)
            for e in range(4):
                gate, up, down = (
                    numbers[f"model.layers.{layer}.mlp.experts.{e}.{kind}_proj.weight"]
                    for kind in ("gate", "up", "down")
                )
                assert torch.equal(matrices["w13"][e], torch.cat([gate, up]))
                assert torch.equal(matrices["w2"][e], down)
        check_logits(llm, model, 0.2)
        for prompt, output in zip(
            random_prompts(3, 20), llm.generate(random_prompts(3, 20), GREEDY, use_tqdm=False), strict=True
        ):
            assert len(output.outputs[0].token_ids) == 12, prompt


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    write_mixture(tmp_path, "qwen3_moe")

    def without_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored, _ = quantized_fp8(tensors)
        return {n: x for n, x in stored.items() if n != "model.layers.1.mlp.experts.2.down_proj.weight_scale"}

    rewrite(tmp_path, without_one)
    set_config(tmp_path, quantization_config=FP8_CONFIG)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2\.down_proj\.weight_scale' is missing"):
        small_llm(tmp_path)


def test_experts_whose_rows_the_blocks_of_scales_do_not_divide(mixture: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(
        CheckpointError, match=r"gate and up share one matrix.* blocks of 128 rows do not divide the 32"
    ):
        small_llm(mixture[0], quantization="fp8", quantization_options=["scales=block"])


CUT = (
    r"--tensor-parallel-size 2: .*experts.{}' is quantized in blocks of 128, and ranks would have 192 of its 384 {} "
    "each, .*whole experts with --enable-expert-parallel, or use fewer ranks"
)
"""Whole experts on each rank serve such a checkpoint as it is, and the error says so."""


def test_experts_whose_blocks_of_rows_only_ranks_cut(tmp_path: Path) -> None:
    write_mixture(tmp_path, "qwen3_moe", moe_intermediate_size=384)
    settings: dict[str, Any] = {"quantization": "fp8", "quantization_options": ["scales=block"]}
    with pytest.raises(ConfigError, match=CUT.format("w13", "rows")):
        small_llm(tmp_path, tensor_parallel_size=2, **settings)
    with ranks_in_threads(tmp_path, 2, enable_expert_parallel=True, **settings):
        pass


def test_experts_whose_groups_of_columns_only_ranks_cut(tmp_path: Path) -> None:
    write_mixture(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=384)

    def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = {f"{name}_scale": x[:, ::128].abs() + 1e-3 for name, x in tensors.items() if ".experts." in name}
        return scales | {name: x.to(torch.int8) if ".experts." in name else x for name, x in tensors.items()}

    rewrite(tmp_path, quantize)
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}
    group = {"targets": ["re:.*experts"], "weights": weights, "format": "int-quantized"}
    set_config(
        tmp_path, quantization_config={"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    )
    with pytest.raises(ConfigError, match=CUT.format("w2", "columns")):
        small_llm(tmp_path, tensor_parallel_size=2)
    with ranks_in_threads(tmp_path, 2, enable_expert_parallel=True):
        pass


def test_experts_that_are_quantized_unlike_each_other(tmp_path: Path) -> None:
    write_mixture(tmp_path, "qwen3_moe")

    def all_but_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored, _ = quantized_fp8(tensors)
        plain = {n: x for n, x in tensors.items() if ".experts.2." in n}
        return {n: x for n, x in stored.items() if ".experts.2." not in n} | plain

    rewrite(tmp_path, all_but_one)
    set_config(tmp_path, quantization_config=FP8_CONFIG)
    with pytest.raises(CheckpointError, match="the matrices of expert 2 are quantized unlike"):
        small_llm(tmp_path)


@pytest.mark.parametrize(("method", "tolerance"), [("fp8", 0.4), ("int8", 0.2), ("int4", 1.5)])
def test_quantized_while_loading(mixture: tuple[Path, PreTrainedModel], method: str, tolerance: float) -> None:
    """The router and the shared expert's gate stay as they are: they are small, and decide much."""
    folder, model = mixture
    options = ["group_size=16"] if method == "int4" else []
    with small_llm(folder, quantization=method, quantization_options=options) as llm:
        check_logits(llm, model, tolerance)
        mlp: Any = mixture_of(llm.core.blueprint.model, 0)
        assert mlp.router.scheme.weight.is_plain
        assert mlp.shared_gate.scheme.weight.is_plain
        assert not mlp.shared.down.scheme.weight.is_plain
        assert mlp.experts.weights["w13.weight"].dtype.itemsize == 1


# Divided


def check_tokens(llm: LLM, model: PreTrainedModel) -> None:
    prompts = random_prompts(3, 25, seed=6)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("settings", [{"enable_expert_parallel": True}, {"expert_parallel_size": 2}], ids=str)
def test_experts_in_one_tensor_divided(settings: dict[str, Any], tmp_path: Path) -> None:
    model = write_mixture(tmp_path)
    rewrite(tmp_path, fused)
    with ranks_in_threads(tmp_path, 4, **settings) as llm:
        check_tokens(llm, model)


@pytest.mark.parametrize("settings", [{"enable_expert_parallel": True}, {}], ids=str)
def test_a_quantized_checkpoint_divided(settings: dict[str, Any], tmp_path: Path) -> None:
    """The ranks' matrices together are those of one rank."""
    write_mixture(tmp_path, "qwen3_moe")
    rewrite(tmp_path, lambda tensors: quantized_fp8(tensors)[0])
    set_config(tmp_path, quantization_config=FP8_CONFIG)
    with small_llm(tmp_path) as llm:
        whole = loaded_experts(llm, 1)
        one = llm.generate(random_prompts(3, 20), GREEDY, use_tqdm=False)
    with ranks_in_threads(tmp_path, 2, **settings) as llm:
        two = llm.generate(random_prompts(3, 20), GREEDY, use_tqdm=False)
        executor = llm.core.executor
        assert isinstance(executor, ThreadsExecutor)
        parts = [mixture_of(blueprint.model, 1).experts for blueprint in executor.blueprints]
        first, second = (experts.kernels[0].unpack(experts.weights) for experts in parts)
    if settings:
        joined = {name: torch.cat([first[name], second[name]]) for name in whole}
    else:
        rows = [half for part in (first, second) for half in part["w13"].chunk(2, 1)]
        joined = {"w13": torch.cat(rows[::2] + rows[1::2], 1), "w2": torch.cat([first["w2"], second["w2"]], 2)}
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    assert [o.outputs[0].token_ids for o in two] == [o.outputs[0].token_ids for o in one]


@pytest.mark.parametrize(
    ("ranks", "settings", "changes", "what"),
    [
        (2, {"enable_expert_parallel": True}, {"num_experts": 3}, "3 experts do not divide"),
        (2, {}, {"moe_intermediate_size": 33}, "width of experts of 33 does not divide"),
        (2, {"enable_expert_parallel": True, "all2all_backend": "local"}, {}, "parallel not supported"),
    ],
    ids=["experts", "width", "all2all"],
)
def test_what_cannot_be_divided(
    ranks: int, settings: dict[str, Any], changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    write_mixture(tmp_path, "qwen3_moe", **changes)
    with pytest.raises(HardpointError, match=what) as caught:
        small_llm(tmp_path, tensor_parallel_size=ranks, **settings)
    assert isinstance(caught.value, (ConfigError, SelectionError))


def test_a_method_can_tell_experts_from_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in four bits, everything else in eight: ``Module.expert`` says which are which."""
    write_mixture(tmp_path)
    seen: dict[str, int | None] = {}

    def specs(method: Int8Online, module: Module) -> tuple[QuantSpec, QuantSpec]:
        seen[module.name] = module.expert
        rows = (Scale("float32", (1, -1)),)
        return QuantSpec("int4" if module.expert is not None else "int8", scales=rows), method.plain

    monkeypatch.setattr(Int8Online, "specs", specs)
    with small_llm(tmp_path, quantization="int8") as llm:
        chosen = {row.family: row.workload for row in llm.table.rows if row.family in ("linear", "experts")}
    in_name = {name: re.search(r"\.experts\.(\d+)\.", name) for name in seen}
    assert seen == {name: int(found[1]) if found else None for name, found in in_name.items()}
    assert len({number for number in seen.values() if number is not None}) > 1
    assert None in seen.values()
    assert "spec=int4" in str(chosen["experts"])
