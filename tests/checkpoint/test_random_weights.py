"""``--load-format random``: a model of the config's shape, the same for a seed, without a weight on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.checkpoint.random_weights import RandomWeights
from hardpoint.layers.loading import load_made_weights
from hardpoint_plugin_api import CheckpointError
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {}, marks=pytest.mark.nightly),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {}),
        pytest.param("mixtral", {}, marks=pytest.mark.nightly),
        ("gpt_oss", {}),
    ],
    ids=["llama", "tied", "qwen3_moe", "mixtral", "gpt_oss"],
)
def test_a_config_is_enough(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, family, **changes)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    drawn = []
    for seed in (1, 1, 2):
        with small_llm(tmp_path, load_format="random", seed=seed) as llm:
            drawn.append(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].logprobs)
            llm.sleep(2)
            llm.wake_up()
            assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].logprobs == drawn[-1]
    assert drawn[0] == drawn[1] != drawn[2]


def test_experts_are_quantized_as_they_are_made(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    with small_llm(tmp_path, load_format="random", quantization="int8") as llm:
        assert len(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_a_tensor_follows_from_its_name_and_the_seed() -> None:
    """Ranks make unlike ones, in unlike orders, and share some."""
    weights = RandomWeights(torch.device("cpu"), torch.float32, seed=1)
    first, other = (weights.make(name, (64, 64)) for name in ("a.weight", "b.weight"))
    assert weights.make("a.weight", (64, 64)).equal(first)
    assert not first.equal(other)
    assert not replace(weights, seed=2).make("a.weight", (64, 64)).equal(first)
    assert abs(first.std().item() - 0.02) < 0.002  # of 4,096 numbers: nine standard errors
    assert weights.make("input_layernorm.weight", (3,)).tolist() == [1, 1, 1]


def test_stacks_of_experts_are_made_whole(tmp_path: Path) -> None:
    """One tensor in place of hundreds."""
    write_checkpoint(tmp_path, "qwen3_moe")
    made = []
    with small_llm(tmp_path) as llm:
        model = llm.core.blueprint.model

        def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            made.append(name)
            return torch.zeros(shape)

        llm.sleep(2)
        load_made_weights(model, model.weight_names, make, torch.device("cpu"), "zeros")
        num_blocks = len(model.stack.blocks)
    assert [name for name in made if ".experts." in name] == [
        f"model.layers.{block}.mlp.experts.{matrix}"
        for block in range(num_blocks)
        for matrix in ("gate_up_proj", "down_proj")
    ]


def test_a_quantized_checkpoint_has_no_random_form(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no random weights can be made .* its weights are quantized"):
        small_llm(tmp_path, load_format="random")
