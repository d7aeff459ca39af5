"""Linear kernels on real hardware, with matrices of a model's sizes: what conformance's small ones cannot show."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint.conformance.families.specs import pair_of
from hardpoint.conformance.site import Site, Subject
from hardpoint.engine.explain import explain
from hardpoint.numerics import fake_quantize, quantize_rows, quantize_weight
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import LinearCall, LinearKernel, LinearWorkload, dequantize
from tests.support.specs import SPECS

pytestmark = pytest.mark.accelerator

_KERNELS = {
    "triton_gemv": ("plain",),
    "triton_gemm": ("plain",),
    "triton_skinny": ("plain",),
    "triton_fp8_skinny": ("fp8-tensor", "fp8-rows-dynamic", "fp8-tiles"),
    "triton_fp8_gemm": ("fp8-tensor", "fp8-rows-dynamic", "fp8-tiles"),
    "cuda_fp8_scaled_mm": ("fp8-rows-dynamic",),
    "triton_int8_skinny": ("int8-rows", "int8-dynamic", "int8-groups"),
    "triton_int8_gemm": ("int8-rows", "int8-dynamic", "int8-groups"),
    "cuda_int8_mm": ("int8-dynamic",),
    "triton_int4": ("uint4-groups",),
    "triton_int4_dequantized": ("uint4-groups",),
}


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cuda")


@pytest.mark.parametrize("spec", ["fp8-rows-dynamic", "fp8-tiles-dynamic", "int8-dynamic"])
def test_references_round_as_on_the_host(spec: str) -> None:
    """To the bit: a scale that is off by its last one sends what is in the middle of two elements the other way."""
    x = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)).half()
    activations = pair_of(SPECS, spec, "float16")[1]
    here, there = quantize_rows(x, activations, {}), quantize_rows(x.cuda(), activations, {})
    assert torch.equal(there.scale.cpu(), here.scale)
    assert torch.equal(there.codes.cpu().view(torch.uint8), here.codes.view(torch.uint8))


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, specs in _KERNELS.items() for spec in specs])
@pytest.mark.parametrize("shape", [(6144, 4096), (1024, 3072), (4096, 14336)])
def test_large_matrices(site: Site, name: str, spec: str, shape: tuple[int, int]) -> None:
    offer = next(o for o in site.plugins.offers("linear") if o.contribution.name == name)
    n, k = shape
    pair = pair_of(SPECS, spec, "bfloat16")
    workload = LinearWorkload(dtype="bfloat16", in_features=k, out_features=n, spec=pair)
    subject = Subject.load(offer, site)
    if subject.refuses(workload) is not None:
        assert name in {"triton_gemm", "triton_skinny"}
        assert n > 2048
        pytest.skip("for small weights")
    kernel = subject.target(site.context("bfloat16"), workload)
    assert isinstance(kernel, LinearKernel)
    generator = torch.Generator(site.device).manual_seed(0)
    drawn = torch.randn(shape, generator=generator, device=site.device) * k**-0.5
    slots = {"weight": drawn.bfloat16()} if pair[0].is_plain else quantize_weight(drawn, pair[0])
    plain = slots["weight"] if pair[0].is_plain else dequantize(slots, pair[0], torch.bfloat16)
    exact = plain.double() if pair[0].is_plain else dequantize(slots, pair[0], torch.float64)
    weights = kernel.prepack(slots)
    for num_rows in (1, 3, 8, 17, 33, 100, 300):
        x = torch.randn(num_rows, k, generator=generator, device=site.device).bfloat16()
        truth = fake_quantize(x.double(), pair[1], {}) @ exact.T
        own = torch.nn.functional.linear(fake_quantize(x, pair[1], {}), plain)
        found = compare(
            str(num_rows), kernel.apply(LinearCall(x, weights)), own.cpu(), truth.cpu(), ErrorModel(), x.device
        )
        assert not found.faults, found.faults


@pytest.mark.parametrize("method", [None, "fp8", "int8", "int4"], ids=str)
def test_all_kernels_of_a_model_are_tuned(method: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each that could serve runs, and the engine chooses by what was measured."""
    path = tmp_path / "tuned.json"
    quantization = ["--quantization", method] if method else []
    with caplog.at_level(logging.WARNING):
        command = [
            "tune",
            "linear",
            "demo",
            "--platform",
            "cuda",
            "--rows",
            "1,16",
            "--rounds",
            "3",
            "--output",
            str(path),
        ]
        assert run([*command, *quantization]) == 0
    assert "left out" not in caplog.text
    config = EngineConfig.create(model="demo", platform="cuda", tuning_file=str(path), quantization=method)
    rows = [row for row in explain(config).rows if row.family == "linear"]
    assert rows
    assert {row.rule for row in rows} <= {"tuning file", "priority"}, "priority: past the end of what won last"
    assert any(row.measured for row in rows)
