"""Checkpoints in ``float8_e4m3fn`` on a device whose 8-bit float is ``float8_e4m3fnuz``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hardpoint import LLM
from hardpoint.layers.linear import Linear
from hardpoint.quantization.device_formats import doubled, halved, on_device
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_plugin_api import AttentionBackend, CheckpointError, DeviceInfo, Fp8Format, QuantSpec, Scale, Scheme
from tests.quantization.fixtures.base_model import FIXTURES, calibration, write_tokenizer
from tests.quantization.formats import FORMATS
from tests.quantization.writing import write_quantized
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import prompt_logits, small_llm

OCP, FNUZ = Fp8Format("float8_e4m3fn", 448.0), Fp8Format("float8_e4m3fnuz", 224.0)
BY_NAME = {str(form): form for form in FORMATS}
REFERENCES = {"linear": "emulated", "attention": "reference"}
"""No kernel of the CPU reads ``float8_e4m3fnuz``; these are asked for by name, so that both devices use the same."""


@pytest.fixture(params=[OCP, FNUZ], ids=lambda fp8: fp8.dtype)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fp8Format:
    """This CPU, which says that it has 8-bit floats of one format or the other."""
    become(monkeypatch, request.param)
    return request.param  # type: ignore[no-any-return]


def become(monkeypatch: pytest.MonkeyPatch, fp8: Fp8Format) -> None:
    """Let the platform describe a device with this format."""
    info = CpuPlatform.detect()
    assert isinstance(info, DeviceInfo)
    monkeypatch.setattr(CpuPlatform, "detect", classmethod(lambda cls: replace(info, fp8=fp8)))


def on_both(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: object) -> Iterator[LLM]:
    """An engine over ``folder`` on each device, one after the other."""
    for fp8 in (OCP, FNUZ):
        with monkeypatch.context() as patch:
            become(patch, fp8)
            with small_llm(folder, dtype="float32", **settings) as llm:
                yield llm


def test_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    source = codes.view(torch.float8_e4m3fn)
    got = halved(source)
    assert torch.equal(got.float().nan_to_num(nan=7e7), (source.float() / 2).nan_to_num(nan=7e7))
    assert not got.float()[0x80].signbit()
    turned = halved(source.view(16, 16).t())
    assert torch.equal(turned.view(torch.uint8), got.view(torch.uint8).view(16, 16).t())
    assert torch.equal(source.view(torch.uint8), codes), "what was read is unchanged"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_double(dtype: torch.dtype) -> None:
    scales = torch.tensor([2.0**-9, 1.0, 64.0]).to(dtype)
    assert torch.equal(doubled(scales).float(), scales.float() * 2)
    assert doubled(scales).dtype == dtype


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 65504.0), (torch.float8_e8m0fnu, 2.0**127)])
def test_a_scale_that_cannot_be_doubled(dtype: torch.dtype, most: float) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be doubled in float.*store these scales in float32"):
        doubled(torch.tensor([1.0, most]).to(dtype))


def test_other_elements_stay() -> None:
    scale = (Scale("float32", (1, -1)),)
    plain = Scheme(QuantSpec("float8_e4m3fn"), QuantSpec("bfloat16"))
    for scheme in (
        plain,
        *(Scheme(QuantSpec(e, scales=scale), QuantSpec("bfloat16")) for e in ("int8", "float8_e5m2")),
    ):
        assert on_device(scheme, FNUZ) is scheme
    fp8 = Scheme(QuantSpec("float8_e4m3fn", scales=scale), QuantSpec("bfloat16"))
    assert [on_device(fp8, fp8_) for fp8_ in (None, OCP)] == [fp8, fp8]
    assert str(on_device(fp8, FNUZ).weight) == "float8_e4m3fnuz@float32:row"


def quantized(llm: LLM) -> dict[str, tuple[Linear, Scheme]]:
    """The linear layers with scales, and their schemes, by path."""
    layers = [(path, m) for path, m in llm.core.blueprint.model.named_modules() if isinstance(m, Linear)]
    return {path: (m, m.scheme) for path, m in layers if m.scheme and not m.scheme.weight.is_plain}


@pytest.mark.parametrize("form", ["fp8-tensor", "fp8-channel", "fp8-block", "fp8-static"])
def test_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Weights are the same numbers. So are rounded activations, since 224 is half of 448; 240 would give others."""
    write_quantized(tmp_path, BY_NAME[form])
    ids = calibration()[0].tolist()
    found: list[tuple[set[str], dict[str, torch.Tensor], torch.Tensor]] = []
    for llm in on_both(monkeypatch, tmp_path, use=REFERENCES):
        layers = quantized(llm)
        elements = {scheme.weight.element for _, scheme in layers.values()}
        weights = {path: layer.kernels[0].unpack(layer.weights) for path, (layer, _) in layers.items()}
        found.append((elements, weights, prompt_logits(llm, ids)))
    first, second = found
    assert (first[0], second[0]) == ({"float8_e4m3fn"}, {"float8_e4m3fnuz"})
    assert all(torch.equal(second[1][path], weight) for path, weight in first[1].items())
    assert torch.equal(first[2], second[2])


def test_scales_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--kv-cache-dtype fp8`` is the device's format, and the checkpoint's scales for it hold the same numbers."""
    folder = tmp_path / "llmcompressor"
    shutil.copytree(FIXTURES / "llmcompressor-fp8-static", folder)
    write_tokenizer(folder)
    stored = load_file(folder / "model.safetensors")["model.layers.0.self_attn.v_scale"].float()
    found: list[tuple[str, torch.Tensor]] = []
    use = {**REFERENCES, "attention": "reference_quantized_cache"}
    for llm in on_both(monkeypatch, folder, kv_cache_dtype="fp8", use=use):
        backend = llm.core.blueprint.ctx.cache_users.users[0].planner
        assert isinstance(backend, AttentionBackend)
        assert backend.cache_scales[1] == stored * (1 if not found else 2)
        found.append((backend.spec.kv_dtype, prompt_logits(llm, calibration()[0].tolist())))
    assert [dtype for dtype, _ in found] == ["float8_e4m3fn", "float8_e4m3fnuz"]
    assert torch.equal(found[0][1], found[1][1])


def test_a_checkpoint_that_is_quantized_while_loading(tmp_path: Path, device: Fp8Format) -> None:
    """The largest weight of each row becomes the format's largest number: 224 of one that reaches 240."""
    write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path, quantization="fp8", dtype="float32", use={"linear": "emulated"}) as llm:
        for layer, scheme in quantized(llm).values():
            assert scheme.weight.element == device.dtype
            assert set(layer.weights["weight"].float().abs().amax(1).tolist()) == {device.max}
