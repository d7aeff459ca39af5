"""A third party's quantization: a method of a new name, one in place of core's, and a matmul with its own layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hardpoint import LLM
from hardpoint_plugin_api import ConfigError, SelectionError
from tests.out_of_tree.test_acme import served
from tests.quantization.writing import Format, Stored, round_weights, write_quantized
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm
from tests.support.forked import run_module

IDS = random_prompts(1, 30, seed=2, shortest=30)[0]


def stored(name: str, weight: torch.Tensor) -> Stored:
    """A module's tensors in Acme's form, and its weight in numbers."""
    blocks = weight.unflatten(-1, (-1, 32))
    steps = blocks.abs().amax(-1) / 127
    codes = (blocks / steps[..., None]).round()
    return {"codes": codes.to(torch.int8).flatten(-2), "steps": steps}, (codes * steps[..., None]).flatten(-2)


FORM = Format("acme", {"quant_method": "acme_groups", "group_size": 32}, stored)


def kernels(llm: LLM) -> dict[str, str]:
    """Which kernel serves which pair of specs."""
    rows = [row for row in llm.table.rows if row.family == "linear"]
    return {row.workload.rpartition("spec=")[2]: row.chosen for row in rows}


def test_a_checkpoint_of_its_own_format(acme: Path, tmp_path: Path) -> None:
    model = write_quantized(tmp_path, FORM)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, IDS) - reference_logits(model, IDS)).abs().max() < 2e-4
        assert served(llm)["quantization", "acme_groups"] == {"acme_groups"}
        assert kernels(llm) == {"int8@float32:1x32/float32": "acme_groups", "float32/float32": "cpu_native"}
        weights = {name for layer in llm.core.blueprint.model.modules() for name in getattr(layer, "weights", {})}
        assert {"codes", "steps"} <= weights, "the layout is its own"


def test_core_serves_its_format_too(acme: Path, tmp_path: Path) -> None:
    model = write_quantized(tmp_path, FORM)
    with small_llm(tmp_path, linear_backend="emulated") as llm:
        assert (prompt_logits(llm, IDS) - reference_logits(model, IDS)).abs().max() < 2e-4
        assert kernels(llm) == {"int8@float32:1x32/float32": "emulated", "float32/float32": "cpu_native"}


@pytest.mark.parametrize(
    ("method", "group", "kernel"), [("acme_groups", 32, "acme_groups"), ("int8", 0, "cpu_native_int8_weight")], ids=str
)
def test_while_loading(acme: Path, tmp_path: Path, method: str, group: int, kernel: str) -> None:
    """By flag, under a name of its own and in place of core's."""

    def numbers(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.unflatten(-1, (-1, group or weight.shape[-1]))
        steps = blocks.abs().amax(-1, keepdim=True) / 127
        dense: torch.Tensor = ((blocks / steps).round() * steps).flatten(-2)
        return dense

    model = write_checkpoint(tmp_path, "llama")
    round_weights(model, numbers, None)
    with small_llm(tmp_path, quantization=method) as llm:
        assert (prompt_logits(llm, IDS) - reference_logits(model, IDS)).abs().max() < 2e-4
        name = f"{method}_online"
        assert served(llm)["quantization", name] == {name if group else "acme_int8_online"}
        assert kernel in kernels(llm).values()


def test_its_kernel_by_flag(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with small_llm(tmp_path, quantization="acme_groups", linear_backend="acme_groups") as llm:
        assert "acme_groups" in kernels(llm).values()
    with pytest.raises(SelectionError, match=r"--linear-backend acme_groups: it cannot serve linear .*spec=int4"):
        small_llm(tmp_path, quantization="int4", quantization_options="group_size=32", linear_backend="acme_groups")
    with pytest.raises(ConfigError, match=r"--quantization-options speed: acme_groups has none"):
        small_llm(tmp_path, quantization="acme_groups", quantization_options="speed=1")


def test_explain_says_who_and_why(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    options = ["explain", str(tmp_path), "--platform", "cpu", "--json", "--quantization", "int8"]
    done = run_module("hardpoint.cli", options, tmp_path, 120, {"PYTHONPATH": str(acme)})
    assert done.returncode == 0, done.stdout
    assert "acme_int8_online" in done.stdout
    assert "plugin acme replaces it by acme_int8_online" in done.stdout
    json.loads(done.stdout)
