"""Experts' matrices that are rounded together while a checkpoint loads: the same slots, in fewer calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import numerics
from hardpoint.checkpoint.formats import open_files
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.layers.base import walk
from hardpoint.layers.loading import GivenTensors, load_weights
from hardpoint.numerics import quantize_stack, quantize_weight
from hardpoint.quantization.methods import online
from hardpoint_plugin_api import CheckpointError, QuantSpec, Scale
from tests.support.checkpoints import write_checkpoint

F32, ROWS = "float32", Scale("float32", (1, -1))
SPECS = [
    QuantSpec("int8", scales=(ROWS,)),
    QuantSpec("float8_e4m3fn", scales=(Scale(F32, (-1, -1)),)),
    QuantSpec("float8_e4m3fn", scales=(Scale(F32, (8, 16)),)),
    QuantSpec("float8_e4m3fn", scales=(Scale(F32, (16, 16)),)),
    QuantSpec("uint4", scales=(Scale("bfloat16", (1, 16)),), zero_point=True),
    QuantSpec("int4", scales=(Scale("bfloat16", (1, 16)),), permuted=True),
    QuantSpec("float4_e2m1", scales=(Scale("float8_e8m0fnu", (1, 32)),)),
    QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, 16)), Scale(F32, (-1, -1)))),
    QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, 16)), Scale(F32, (8, -1)))),
    QuantSpec("uint4", scales=(Scale("uint8", (1, 32)), Scale("float16", (1, 64))), minimum=True),
]
EXPERTS, LAYERS = 5, 3


@pytest.mark.parametrize("chunk", [1, 4000, 1 << 19], ids=["alone", "some", "all"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_stack_is_its_matrices(monkeypatch: pytest.MonkeyPatch, spec: QuantSpec, chunk: int) -> None:
    """Blocks of 16 rows reach from one matrix of 24 into the next, and such matrices are rounded by themselves."""
    drawn = torch.randn(EXPERTS, 64, 24, generator=torch.Generator().manual_seed(0))
    weights = (drawn * torch.tensor([1.0, 40.0, 0.0, 0.01, 3.0]).view(-1, 1, 1)).bfloat16().transpose(1, 2)
    each = [quantize_weight(one, spec) for one in weights]
    monkeypatch.setattr(numerics, "_CHUNK", chunk)
    got = quantize_stack(weights, spec)
    assert got.keys() == each[0].keys()
    for name, slot in got.items():
        assert torch.equal(slot.view(torch.uint8), torch.stack([one[name] for one in each]).view(torch.uint8)), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    }
    write_checkpoint(folder, "qwen3_moe", **sizes)
    return folder


def slots(folder: Path, settings: dict[str, str], order: int) -> dict[str, torch.Tensor]:
    """The experts' slots, loaded from tensors in one of many orders."""
    blueprint = draw(EngineConfig.create(model=str(folder), platform="cpu", moe_backend="reference", **settings))
    model, source = blueprint.model, list(open_files(folder).tensors())
    random.Random(order).shuffle(source)
    load_weights(model, model.weight_names, GivenTensors(source), blueprint.ctx.torch_device)
    layers = ((path, layer) for path, layer in walk(model) if path.endswith("experts"))
    return {f"{path}.{name}": tensor for path, layer in layers for name, tensor in layer.weights.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int4", "quantization_options": "group_size=32"},
        {"quantization": "fp8", "quantization_options": "scales=tensor"},
        {"quantization": "mxfp4"},
        {"quantization": "nvfp4"},
    ],
    ids=lambda settings: settings["quantization"],
)
def test_loading_gathers_them(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    calls = list[int]()

    def counted(weights: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
        calls.append(len(weights))
        return quantize_stack(weights, spec)

    monkeypatch.setattr(online, "quantize_stack", counted)
    in_order, shuffled = (slots(checkpoint, settings, order) for order in (0, 1))
    assert sum(calls) == 2 * LAYERS * EXPERTS * 3
    monkeypatch.setattr(numerics, "_CHUNK", 1)
    alone = slots(checkpoint, settings, 0)
    assert sum(calls) == 2 * LAYERS * EXPERTS * 3, "matrices as large as a chunk are not gathered"
    for name, expected in alone.items():
        for got in (in_order, shuffled):
            assert torch.equal(got[name].view(torch.uint8), expected.view(torch.uint8)), name


def test_one_call_for_a_layers_kind(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of files a layer's gates are one call, its ups one, and its downs one."""
    sizes = list[int]()

    def counted(weights: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
        sizes.append(len(weights))
        return quantize_stack(weights, spec)

    monkeypatch.setattr(online, "quantize_stack", counted)
    blueprint = draw(EngineConfig.create(model=str(checkpoint), platform="cpu", quantization="mxfp4"))
    model = blueprint.model
    load_weights(model, model.weight_names, open_files(checkpoint).tensors(), blueprint.ctx.torch_device)
    assert sizes == [EXPERTS] * 3 * LAYERS


def test_a_tensor_that_comes_twice(checkpoint: Path) -> None:
    blueprint = draw(EngineConfig.create(model=str(checkpoint), platform="cpu", quantization="mxfp4"))
    model = blueprint.model

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in open_files(checkpoint).tensors():
            yield name, tensor
            if name.endswith("layers.0.mlp.experts.1.up_proj.weight"):
                yield name, tensor

    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.experts.1.up_proj.weight' is there twice"):
        load_weights(model, model.weight_names, GivenTensors(tensors()), blueprint.ctx.torch_device)
