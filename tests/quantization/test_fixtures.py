"""Checkpoints that the public tools wrote: dequantized, they are the tools' own numbers to the bit.

``fixtures/with_TOOL.py`` made them, each in an environment of its own (``fixtures/make.sh``).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hardpoint import LLM
from hardpoint.layers.linear import Linear
from tests.quantization.fixtures.base_model import FIXTURES, MODULES, calibration, write_tokenizer
from tests.support.engines import prompt_logits, small_llm

ALL = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir())
NAMES = [name for name in ALL if not name.startswith("quark")]
"""Without those that the plugin of one platform reads: ``tests/rocm/test_quark.py``."""
TOOLS = {"autoawq", "bitsandbytes", "compressed-tensors", "gptqmodel", "llmcompressor", "modelopt", "quark", "torchao"}
LAYERS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "out",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}
"""Which of the engine's layers holds a module of the checkpoint."""

NOT_READ_BY_TRANSFORMERS = {
    "compressed-tensors-w4a16-asymmetric": "5.23 does not unpack the zero points of compressed-tensors 0.20",
    "gptqmodel-4-desc-act": "it takes a kernel of torch that has no groups of 16",
    **dict.fromkeys(
        ("bitsandbytes-fp4", "bitsandbytes-nf4", "bitsandbytes-nf4-double"),
        "5.23 does not load bitsandbytes' 4 bits on CPUs",
    ),
    **dict.fromkeys((name for name in NAMES if name.startswith("modelopt")), "it has no reader of this method"),
}
ROUNDED_INPUTS = (
    "dynamic",
    "fp8",
    "fp8-block",
    "fp8-static",
    "int8",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "w4a8",
    "w8a8",
    "w8a8-static",
)
"""Ends the names of fixtures whose activations are rounded."""
ONE_SCALE = ("torchao-float8-tensor-dynamic",)
"""The tool has one scale for all tokens of a batch, Hardpoint one for each."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a fixture, with a tokenizer."""
    copy = tmp_path / str(request.param)
    shutil.copytree(FIXTURES / request.param, copy, ignore=shutil.ignore_patterns("dequantized.*", "logits.*"))
    write_tokenizer(copy)
    return copy


def loaded_weights(llm: LLM, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The engine's weights in numbers, by the checkpoint's names."""
    layers = {
        path.rpartition(".")[2]: layer
        for path, layer in llm.core.blueprint.model.named_modules()
        if isinstance(layer, Linear)
    }
    found = {}
    for module in MODULES:
        name = module.rpartition(".")[2]
        layer = layers[LAYERS[name]]
        assert layer.scheme is not None
        weight = layer.kernels[0].unpack(layer.weights).to(dtype)
        blocks = dict(zip(dict(layer.args.parts), weight.split([rows for _, rows in layer.args.parts]), strict=True))
        found[f"{module}.weight"] = blocks.get(name.removesuffix("_proj"), weight)
    return found


def dtype_of(name: str) -> str:
    """The dtype of a fixture's own model."""
    return "float16" if name.startswith(("autoawq", "gptqmodel")) else "bfloat16"


def test_every_tool_has_its_fixtures() -> None:
    assert {tool for tool in TOOLS if any(name.startswith(tool) for name in ALL)} == TOOLS
    assert sum(file.stat().st_size for file in FIXTURES.rglob("*") if file.is_file()) < 2_200_000


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_dequantized_weights_are_the_tools(folder: Path) -> None:
    expected = load_file(FIXTURES / folder.name / "dequantized.safetensors")
    with small_llm(folder, dtype=dtype_of(folder.name)) as llm:
        for name, numbers in expected.items():
            got = loaded_weights(llm, numbers.dtype)[name]
            assert torch.equal(got, numbers), f"{name}: {int((got != numbers).sum())} elements differ"


@pytest.mark.parametrize("folder", [n for n in NAMES if n not in NOT_READ_BY_TRANSFORMERS], indirect=True)
def test_logits_are_those_of_transformers(folder: Path) -> None:
    expected = load_file(FIXTURES / folder.name / "logits.safetensors")["logits"]
    with small_llm(folder, dtype=dtype_of(folder.name)) as llm:
        got = prompt_logits(llm, calibration()[0].tolist())
    if folder.name.endswith(ROUNDED_INPUTS):  # Transformers may leave activations as they are, or round to a neighbour
        least = 0.8 if folder.name.endswith("fp4") else 0.98 if folder.name in ONE_SCALE else 0.99
        assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > least
    else:
        assert (got - expected).abs().max() < 0.04, "beyond what 16-bit activations make of logits of about 2"
