"""Checkpoints in 4-bit floats on a GPU: weights as they are stored, activations as they come."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import CheckpointError, DeviceInfo
from tests.quantization.formats import FORMATS
from tests.quantization.writing import change_tensors, write_quantized
from tests.support.checkpoints import random_prompts, reference_logits
from tests.support.engines import prompt_logits, small_llm
from tests.support.on_host_settings import without_triton
from tests.support.two_gpus import two_gpus

BY_NAME = {form.name: form for form in FORMATS}
IDS = random_prompts(1, 40, seed=5, shortest=24)[0]


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    return two_gpus(monkeypatch, CudaPlatform, describe_arch("NVIDIA H100 80GB HBM3", (9, 0)))


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "ct-nvfp4"])
def test_activations_stay_as_they_are(
    h100: DeviceInfo, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits are those of Transformers' model with the weights that are stored, and inputs that nobody rounded."""
    model = write_quantized(tmp_path, replace(BY_NAME[name], inputs=None))
    with caplog.at_level(logging.INFO), small_llm(tmp_path, **without_triton("cuda", dtype="float32")) as llm:
        got, expected = prompt_logits(llm, IDS), reference_logits(model, IDS)
    (message,) = (text for text in caplog.messages if text.startswith("activations stay in float32"))
    assert "--deny quantization." in message
    assert (got - expected).abs().max() < 1e-4
    with small_llm(tmp_path) as llm:
        by_core = prompt_logits(llm, IDS)
    assert (by_core - expected).abs().max() > 1e-2, "core's reader rounds them"


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "ct-nvfp4"])
@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
def test_a_fast_product_serves(tmp_path: Path, name: str, device: str) -> None:
    """Where core's readers would ask for one that nothing but emulation has."""
    write_quantized(tmp_path, BY_NAME[name], hidden_size=256, intermediate_size=512)

    def chosen(**more: object) -> set[str]:
        config = EngineConfig.create(model=str(tmp_path), plugins=("cuda",), dtype="bfloat16", **more)
        rows = explain(config, device).rows
        return {row.chosen for row in rows if row.family == "linear" and "float4" in row.workload}

    assert chosen() == {"triton_float4"}
    off = ("quantization.modelopt=cuda_modelopt", "quantization.compressed-tensors=cuda_compressed_tensors")
    assert chosen(deny=off) == {"emulated"}


def test_other_formats_are_as_core_reads_them(h100: DeviceInfo, tmp_path: Path) -> None:
    model = write_quantized(tmp_path, BY_NAME["modelopt-fp8"])
    with small_llm(tmp_path, **without_triton("cuda", dtype="float32")) as llm:
        got = prompt_logits(llm, IDS)
        specs = {row.workload for row in llm.table.rows if row.family == "linear"}
    assert (got - reference_logits(model, IDS)).abs().median() < 2e-4
    assert any("/float8_e4m3fn" in spec for spec in specs)


def test_a_scale_that_is_missing_is_said(h100: DeviceInfo, tmp_path: Path) -> None:
    """Though nothing is multiplied by it: the checkpoint is not whole."""
    write_quantized(tmp_path, BY_NAME["modelopt-nvfp4"])
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.input_scale"))
    with pytest.raises(CheckpointError, match=r"input_scale' is missing, and quant_algo is NVFP4"):
        small_llm(tmp_path, **without_triton("cuda"))
