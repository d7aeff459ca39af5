"""Checkpoints in the layouts of AMD Quark, written here with nothing of the plugin's code."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hardpoint_plugin_api import CheckpointError, HardpointError
from hardpoint_rocm.platform import RocmPlatform, describe_arch
from tests.parallel.ranks import ranks_in_threads
from tests.quantization.fixtures.base_model import FIXTURES, write_tokenizer
from tests.quantization.test_fixtures import ALL, loaded_weights
from tests.quantization.writing import Format, Stored, change_tensors, write_quantized
from tests.support.aiter_calls import CALLS
from tests.support.checkpoints import random_prompts, reference_logits
from tests.support.engines import SMALL, prompt_logits, small_llm
from tests.support.on_host_settings import without_triton
from tests.support.two_gpus import two_gpus

TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None, "symmetric": True}
CHANNEL = TENSOR | {"qscheme": "per_channel", "ch_axis": 0}
DYNAMIC = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True, "ch_axis": 1}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def config(weight: dict[str, Any] | None, inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    numbers = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": numbers,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "algo_config": None,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **more,
    }


def per_tensor(name: str, w: torch.Tensor) -> Stored:
    scale = w.abs().max() / 448
    q = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def static(name: str, w: torch.Tensor) -> Stored:
    stored, numbers = per_tensor(name, w)
    return {**stored, "input_scale": torch.tensor(0.02)}, numbers


def per_channel(name: str, w: torch.Tensor) -> Stored:
    scale = w.abs().amax(1) / 448
    q = (w / scale[:, None]).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale}, q.float() * scale[:, None]


def mxfp4(name: str, w: torch.Tensor) -> Stored:
    groups = w.unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    magnitude = groups.abs() / exponent.exp2()[..., None]
    codes = (magnitude[..., None] - E2M1).abs().argmin(-1)
    signed = (codes | (groups < 0).long() << 3).flatten(1)
    numbers = E2M1[codes] * groups.sign() * exponent.exp2()[..., None]
    packed = (signed[:, 0::2] | signed[:, 1::2] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": (exponent + 127).to(torch.uint8)}, numbers.flatten(1)


def by_token(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def by_one_scale(x: torch.Tensor) -> torch.Tensor:
    return (x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.02


def mixed(name: str, w: torch.Tensor) -> Stored:
    return mxfp4(name, w) if ".mlp." in name else per_channel(name, w)


MIXED = config(
    None,
    layer_quant_config={"*.mlp.*": {"weight": MX}, "*_proj": {"weight": CHANNEL}},
    exclude=["lm_head", "*.layers.2.*", "re:.*up_proj"],
)
LAST = tuple(
    f"layers.2.{part}" for part in ("mlp.gate_proj", "mlp.down_proj", *(f"self_attn.{x}_proj" for x in "qkvo"))
)


@pytest.mark.parametrize(
    "form",
    [
        Format("per-tensor", config(TENSOR), per_tensor),
        Format("static", config(TENSOR, TENSOR), static, by_one_scale),
        Format("per-channel", config(CHANNEL, DYNAMIC), per_channel, by_token),
        Format("mxfp4", config(MX), mxfp4),
        Format("mxfp4-fp8", config(MX, DYNAMIC), mxfp4, by_token),
        Format("mixed", MIXED, mixed, skip=("lm_head", "up_proj", *LAST)),
    ],
    ids=str,
)
def test_read(mi300x: None, tmp_path: Path, form: Format) -> None:
    """Logits are those of Transformers' model with the numbers that are stored."""
    model = write_quantized(tmp_path, form, "llama")
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path, **without_triton("rocm", dtype="float32")) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.998


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("quark")])
def test_checkpoints_of_quark_itself(mi300x: None, tmp_path: Path, name: str) -> None:
    """Dequantized, they are the numbers that Quark itself reads, to the bit (``fixtures/with_quark.py``)."""
    shutil.copytree(FIXTURES / name, tmp_path / name, ignore=shutil.ignore_patterns("dequantized.*"))
    write_tokenizer(tmp_path / name)
    expected = load_file(FIXTURES / name / "dequantized.safetensors")
    with small_llm(tmp_path / name, **without_triton("rocm", dtype="bfloat16")) as llm:
        found = loaded_weights(llm, torch.bfloat16)
        prompt_logits(llm, [1, 2, 3])
    for module, numbers in expected.items():
        got = found[module]
        assert torch.equal(got, numbers), f"{module}: {int((got != numbers).sum())} elements differ"


@pytest.mark.parametrize("inputs", [MX | {"is_dynamic": True}, None])
def test_what_is_slow_is_said_once(
    mi300x: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, inputs: dict[str, Any] | None
) -> None:
    write_quantized(tmp_path, Format("mx", config(MX, inputs), mxfp4), "llama")
    with (
        caplog.at_level(logging.WARNING, "hardpoint_rocm.mx_products"),
        small_llm(tmp_path, **without_triton("rocm", dtype="float32")) as llm,
    ):
        prompt_logits(llm, [1, 2, 3])
    (message,) = warnings_in(caplog)
    assert "is in an OCP MX format, and core's emulated product serves for it, and for" in message
    assert "aiter_mxfp4" in message


def test_both_operands_in_mxfp4(aiter: None, mi355x: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """AITER's product serves, with core's tokens, and nothing is said to be slow."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    write_quantized(tmp_path, Format("mx", config(MX, MX | {"is_dynamic": True}), mxfp4), "llama", **sizes)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]

    def run(**more: Any) -> tuple[torch.Tensor, set[str]]:
        with small_llm(tmp_path, **(without_triton("rocm", dtype="bfloat16") | more)) as llm:
            return prompt_logits(llm, ids), {row.chosen for row in llm.table.rows if row.family == "linear"}

    with caplog.at_level(logging.WARNING, "hardpoint_rocm.mx_products"):
        got, chosen = run()
    assert chosen == {"aiter_mxfp4", "torch"}, "torch's product is that of the head"
    assert CALLS["gemm_afp4wfp4"] > 0
    assert not warnings_in(caplog)
    expected, chosen = run(deny=(*without_triton("rocm")["deny"], "linear=aiter_mxfp4"))
    assert chosen == {"emulated", "torch"}
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.999


def test_a_size_that_aiter_refuses_is_said_to_be_slow(
    aiter: None, mi355x: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the matrix; the layers of other sizes are multiplied by AITER."""
    sizes = {"hidden_size": 320, "intermediate_size": 256, "head_dim": 64}
    write_quantized(tmp_path, Format("mx", config(MX, MX | {"is_dynamic": True}), mxfp4), "llama", **sizes)
    with (
        caplog.at_level(logging.WARNING, "hardpoint_rocm.mx_products"),
        small_llm(tmp_path, **without_triton("rocm", dtype="bfloat16")) as llm,
    ):
        chosen = {row.chosen for row in llm.table.rows if row.family == "linear"}
    assert chosen == {"aiter_mxfp4", "emulated", "torch"}
    (message,) = warnings_in(caplog)
    assert re.search(r"320.*is in an OCP MX format.*aiter_mxfp4.*wanted 320, supported multiples of 128", message)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_slow_is_what_ranks_have(
    aiter: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    """AITER multiplies the checkpoint's matrix of 384 columns, and not the slice of 192 that each of two ranks has."""
    two_gpus(monkeypatch, RocmPlatform, describe_arch("AMD Instinct MI355X", "gfx950"))
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
    write_quantized(tmp_path, Format("mx", config(MX, MX | {"is_dynamic": True}), mxfp4), "llama", **sizes)
    with (
        caplog.at_level(logging.WARNING, "hardpoint_rocm.mx_products"),
        ranks_in_threads(tmp_path, ranks, **without_triton("rocm", dtype="bfloat16")) as llm,
    ):
        chosen = {row.chosen for row in llm.table.rows if row.family == "linear"}
    assert ("emulated" in chosen) == (ranks == 2)
    messages = warnings_in(caplog)
    assert len(messages) == ranks - 1, "the first rank speaks for all"
    assert all("wanted 192, supported multiples of 128" in message for message in messages)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hardpoint_rocm.mx_products"]


def test_it_is_of_one_platform(tmp_path: Path) -> None:
    write_quantized(tmp_path, Format("tensor", config(TENSOR), per_tensor), "llama")
    with pytest.raises(HardpointError, match=r"(?s)quark.*platform"):
        small_llm(tmp_path, **SMALL)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (config(MX | {"dtype": "fp6_e3m2"}), r"global_quant_config: weight: 'dtype' .*must be one of fp8_e4m3, fp4"),
        (config(MX | {"group_size": 16}), r"'group_size'.*must be one of 32"),
        (config(MX | {"scale_format": "e5m3"}), r"'scale_format'.*must be one of e8m0"),
        (config(CHANNEL | {"ch_axis": 1}), r"'ch_axis'.*must be 0"),
        (config(TENSOR, CHANNEL), r"'is_dynamic'.*may be false only for fp8_e4m3 per_tensor"),
        (config(TENSOR, TENSOR), r"input_scale' is missing, and activations are static"),
        (config([MX, TENSOR]), r"'weight'.*must be an object"),  # type: ignore[arg-type]
        (config(TENSOR, export={"weight_format": "fake_quantized"}), r"'weight_format'.*must be one of real_quantized"),
    ],
    ids=range(8),
)
def test_what_is_not_read_is_an_error(mi300x: None, tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    write_quantized(tmp_path, Format("wrong", wrong, per_tensor), "llama", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path, **without_triton("rocm"))


def test_rotated_inputs_are_an_error(mi300x: None, tmp_path: Path) -> None:
    write_quantized(tmp_path, Format("rotated", config(TENSOR), per_tensor), "llama", num_hidden_layers=1)
    name = "model.layers.0.mlp.down_proj.input_rotation"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(96, 96, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"down_proj' rotates its input"):
        small_llm(tmp_path, **without_triton("rocm"))
