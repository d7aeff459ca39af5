"""Quantizing plain checkpoints while they load: the logits of the same model with the rounded numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from hardpoint.selection.table import SelectionTable
from tests.quantization.writers import by_blocks, fp8_inputs, int8_inputs, integers, nearest, powers
from tests.quantization.writing import round_weights
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

Rounding = Callable[[torch.Tensor], torch.Tensor]


def e4m3(n: int, k: int) -> Rounding:
    """Rounded to 8-bit floats, a scale for each n x k block; 0 is all."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        _, each = by_blocks(weight, n or weight.shape[0], k or weight.shape[1], 448)
        return (weight / each).to(torch.float8_e4m3fn).float() * each

    return rounded


def int8(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to 8-bit integers, a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def int4(group: int, symmetric: bool) -> Rounding:
    """Rounded to 4-bit integers in groups of columns."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        if symmetric:  # the number of the largest magnitude is -8 times the scale
            groups = weight.unflatten(1, (-1, group))
            scale = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
            numbers: torch.Tensor = (groups / scale).round().clamp(max=7) * scale
            return numbers.flatten(1)
        of = torch.arange(weight.shape[1]) // group
        found: torch.Tensor = integers(weight, group, 4, False, torch.float32, of)[-1]
        return found

    return rounded


def nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to e2m1, with scales of e4m3 for 16 columns and one scale for all."""
    outer = weight.abs().max() / (6 * 448)
    groups = (weight / outer).unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    numbers: torch.Tensor = nearest(groups / scale, "e2m1") * scale * outer
    return numbers.flatten(-2)


def int4_by_default(weight: torch.Tensor) -> torch.Tensor:
    """Without zero points, in the largest usual groups that divide the columns."""
    return int4(next(size for size in (128, 64, 32) if weight.shape[-1] % size == 0), True)(weight)


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to quantiles of the normal distribution (arXiv:2305.14314, appendix E), a scale for 32 columns."""
    quantile = NormalDist().inv_cdf
    above = [quantile(0.9677083 + (0.5 - 0.9677083) * i / 8) for i in range(8)]
    below = [-quantile(0.9677083 + (0.5 - 0.9677083) * i / 7) for i in range(7)]
    values = torch.tensor(sorted([*above, 0.0, *below])) / above[0]
    groups = weight.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True)
    numbers: torch.Tensor = values[(groups / scale)[..., None].sub(values).abs().argmin(-1)] * scale
    return numbers.flatten(-2)


ONLINE = [
    ("fp8", "", e4m3(1, 0), fp8_inputs()),
    ("fp8", "scales=tensor", e4m3(0, 0), fp8_inputs()),
    ("fp8", "scales=block", e4m3(128, 128), fp8_inputs(128)),
    ("fp8", "activations=none", e4m3(1, 0), None),
    ("int8", "", int8, int8_inputs),
    ("int8", "activations=none", int8, None),
    ("int4", "", int4_by_default, None),
    ("int4", "group_size=32", int4(32, True), None),
    ("int4", "group_size=16,symmetric=false", int4(16, False), None),
    ("int4", "group_size=32,symmetric=false,lm_head=true", int4(32, False), None),
    ("int4", "group_size=32,lm_head=false", int4(32, True), None),
    ("fp8", "lm_head=true", e4m3(1, 0), fp8_inputs()),
    ("mxfp8", "", powers(8, "e4m3"), None),
    ("mxfp8", "activations=dynamic", powers(8, "e4m3"), powers(8, "e4m3")),
    ("mxfp4", "", powers(2, "e2m1"), None),
    ("mxfp4", "activations=dynamic", powers(2, "e2m1"), powers(2, "e2m1")),
    ("nvfp4", "", nvfp4, None),
    ("nf4", "group_size=32", nf4, None),
]


def head_rounding(method: str, options: str, weights: Rounding) -> Rounding | None:
    """How the output head is rounded: as asked, and else to int8 by methods of 4 bits alone."""
    if "lm_head=true" in options:
        return weights
    is_kept = "lm_head=false" in options or method not in ("int4", "mxfp4", "nvfp4", "nf4")
    return None if is_kept else int8


@pytest.mark.parametrize(("method", "options", "weights", "inputs"), ONLINE)
def test_logits_are_those_of_the_rounded_numbers(
    tmp_path: Path,
    method: str,
    options: str,
    weights: Rounding,
    inputs: Rounding | None,
) -> None:
    model = write_checkpoint(tmp_path, "qwen3", hidden_size=128, head_dim=32, intermediate_size=192)
    round_weights(model, weights, inputs, head=head_rounding(method, options, weights))
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path, quantization=method, quantization_options=options) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
    if inputs is None:
        assert (got - expected).abs().max() < 2e-4
    else:  # an activation at the border of two elements may be rounded to either, and the tokens behind it read it
        assert (got - expected)[:8].abs().median() < 2e-4
        assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.995


def int4_groups(table: SelectionTable, family: str) -> set[str]:
    """The specs of a family's 4-bit weights."""
    workloads = [row.workload for row in table.rows if row.family == family]
    return {spec for text in workloads for spec in re.findall(r"int4@bfloat16:\d+x\d+", text)}


def test_groups_of_int4_divide_what_a_rank_has(tmp_path: Path) -> None:
    """No kernel takes a group that two ranks share; matrices whose rows are divided keep the larger groups."""
    write_checkpoint(tmp_path, "qwen3", hidden_size=256, head_dim=32, intermediate_size=384)
    settings: dict[str, Any] = {"model": str(tmp_path), "platform": "cpu", "dtype": "bfloat16", "quantization": "int4"}
    alone = explain(EngineConfig.create(**settings))
    divided = explain(EngineConfig.create(**settings, tensor_parallel_size=2))
    assert int4_groups(alone, "linear") == {"int4@bfloat16:1x128"}
    assert int4_groups(divided, "linear") == {"int4@bfloat16:1x128", "int4@bfloat16:1x64"}


@pytest.mark.parametrize(("width", "ranks", "group"), [(192, 1, 64), (160, 1, 32), (192, 2, 32), (256, 2, 64)])
def test_experts_have_groups_of_one_size(width: int, ranks: int, group: int, tmp_path: Path) -> None:
    """Both matrices of a mixture, whatever divides the columns of one alone: kernels ask for that."""
    write_checkpoint(tmp_path, "qwen3_moe", hidden_size=256, head_dim=32, moe_intermediate_size=width)
    settings: dict[str, Any] = {"model": str(tmp_path), "platform": "cpu", "dtype": "bfloat16", "quantization": "int4"}
    table = explain(EngineConfig.create(**settings, tensor_parallel_size=ranks))
    assert int4_groups(table, "experts") == {f"int4@bfloat16:1x{group}"}


@pytest.mark.parametrize("kernel", ["emulated", "dequantized"])
def test_either_kernel_by_name(tmp_path: Path, kernel: str) -> None:
    """Dequantizing once, while loading, gives the same as dequantizing at each call."""
    write_checkpoint(tmp_path, "llama")
    ids = random_prompts(1, 20, seed=3, shortest=20)[0]
    settings = {"quantization": "int4", "quantization_options": "group_size=32"}
    with small_llm(tmp_path, **settings) as llm:
        expected = prompt_logits(llm, ids)
    with small_llm(tmp_path, **settings, use={"linear": kernel}) as llm:
        assert {row.chosen for row in llm.table.rows if row.family == "linear" and "=int4@" in row.workload} == {kernel}
        assert (prompt_logits(llm, ids) - expected).abs().max() < 1e-4


def test_a_head_that_the_named_kernel_cannot_serve(tmp_path: Path) -> None:
    """It is served automatically; a name that serves its format is kept to."""
    write_checkpoint(tmp_path, "llama")
    settings = {"quantization": "int4", "quantization_options": "group_size=32"}
    with small_llm(tmp_path, **settings, linear_backend="cpu_native_int4") as llm:
        chosen = {row.workload.split("spec=")[1]: row.chosen for row in llm.table.rows if row.family == "linear"}
    assert {name for spec, name in chosen.items() if spec.startswith("int4")} == {"cpu_native_int4"}
    assert {name for spec, name in chosen.items() if spec.startswith("int8")} == {"cpu_native_int8_weight"}


def test_batch_invariance(tmp_path: Path) -> None:
    """A prompt's logits are the same to the bit whether it is cut or whole."""
    write_checkpoint(tmp_path, "llama")
    ids = random_prompts(1, 40, seed=3, shortest=40)[0]
    settings = {"quantization": "int4", "quantization_options": "group_size=32", "batch_invariant": True}
    with small_llm(tmp_path, **settings) as llm:
        assert torch.equal(prompt_logits(llm, ids), prompt_logits(llm, ids, chunk=7))


def test_norms_of_results_and_across_heads(tmp_path: Path) -> None:
    """A projection before such a norm is rounded like any other."""
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192, "sliding_window": 9}
    model = write_checkpoint(tmp_path, "olmo3", **sizes)
    round_weights(model, int8, int8_inputs)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path, quantization="int8") as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
    assert (got - expected).abs().median() < 2e-4
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.995


@pytest.mark.parametrize("method", ["int4", "nvfp4"])
@pytest.mark.parametrize(("family", "top_k"), [("gpt_oss", 2), ("llama4", 1)])
def test_experts_that_stand_in_one_tensor(tmp_path: Path, family: str, top_k: int, method: str) -> None:
    """Each expert's matrix is rounded by itself, gate and up as one, whatever the order of rows and columns."""
    sizes: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": top_k,
        "hidden_size": 64,
        "intermediate_size": 64,
        "sliding_window": 9,
    }
    model = write_checkpoint(tmp_path, family, **sizes)
    rounded = {"int4": int4(32, True), "nvfp4": nvfp4}[method]
    round_weights(model, rounded, None, head=int8)
    for name, stack in model.named_parameters():
        if name.endswith("_proj") and ".experts." in name:
            stack.data = torch.stack([rounded(matrix.t()).t() for matrix in stack.data])
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    options = "group_size=32" if method == "int4" else ""
    with small_llm(tmp_path, quantization=method, quantization_options=options) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
    assert (got - expected).abs().max() < 2e-4
