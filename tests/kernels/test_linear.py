"""Linear kernels in the interpreter, held to the error model by the trials that a device would make."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch

from hardpoint.conformance.checks import values
from hardpoint.conformance.families.linear import LinearProbe, quantized_input, unpack
from hardpoint.conformance.families.specs import SPECS
from hardpoint.conformance.site import Site, Subject
from hardpoint.kernels import gemv as gemv_module
from hardpoint.kernels import weight_only
from hardpoint.kernels.block_scaled import TritonScaledGemm, TritonScaledGemv
from hardpoint.kernels.gemv import GemvConfiguration, gemv, gemv_configuration
from hardpoint.plugins import discover
from hardpoint.quantization.emulated_linear import EmulatedLinear
from hardpoint.quantization.numerics import quantize_weight
from hardpoint_cuda.linear import Fp8ScaledMatmul, Int8Matmul
from hardpoint_plugin_api import LinearKernel, LinearWorkload, QuantSpec, Scale


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by programs, so they are large here."""
    few = partial(gemv_configuration, programs=8)
    monkeypatch.setattr(gemv_module, "gemv_configuration", few)
    monkeypatch.setattr(weight_only, "gemv_configuration", lambda rows, n, row_bytes, *_: few(rows, n, row_bytes))


def _probe(site: Site, name: str, **row: str) -> LinearProbe:
    offer = next(o for o in site.plugins.offers("linear") if o.contribution.name == name)
    subject = Subject.load(offer, site)
    probe = LinearProbe(subject, {"dtype": "bfloat16", "spec": "plain", "bias": "no-bias", "tokens": "one", **row})
    reason = subject.refuses(probe.workload)
    assert reason is None or reason.code in ("arch", "device-feature")  # the host lacks what is not needed here
    return probe


def _judge(probe: LinearProbe) -> None:
    for finding in (values.values(probe, 0), unpack(probe), quantized_input(probe, 0)):
        assert not finding.faults, finding


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("widths", "tokens", "bias"),
    [("even", "one", "bias"), ("odd", "few", "no-bias"), ("narrow", "few", "bias"), ("wide", "none", "no-bias")],
)
def test_gemv(site: Site, dtype: str, widths: str, tokens: str, bias: str) -> None:
    _judge(_probe(site, "triton_gemv", dtype=dtype, widths=widths, tokens=tokens, bias=bias))


@pytest.mark.parametrize(
    ("dtype", "widths", "tokens"),
    [("float16", "odd", "few"), ("bfloat16", "wide", "many"), ("bfloat16", "even", "none")],
)
def test_gemm(site: Site, dtype: str, widths: str, tokens: str) -> None:
    _judge(_probe(site, "triton_gemm", dtype=dtype, widths=widths, tokens=tokens, bias="bias"))


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_gemv_loops_over_columns_and_rows(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (num_rows, 1200), generator=generator).float()[:, ::2]
    weight = torch.randint(-9, 9, (37, 608), generator=generator).float()[:, :600]
    for cut in (GemvConfiguration(2, 16, 1), GemvConfiguration(4, 16, 2, unroll=2)):
        got = gemv(x, weight, None, torch.float32, configuration=cut)
        assert torch.equal(got, x @ weight.T)  # whole numbers: any order of summation is exact


_TILES = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 128)),), static=False)


@pytest.mark.parametrize("size", ["gemv", "gemm"])
@pytest.mark.parametrize(
    ("spec", "widths", "tokens", "dtype"),
    [
        ("int8-rows", "odd", "one", "bfloat16"),
        ("int8-dynamic", "even", "one", "bfloat16"),
        ("int8-dynamic", "narrow", "few", "float32"),
        ("int8-groups", "even", "one", "float16"),
        ("fp8-tensor", "narrow", "few", "bfloat16"),
        ("fp8-rows-dynamic", "even", "one", "float32"),
        ("fp8-tiles-dynamic", "wide", "one", "bfloat16"),
        ("fp8-rows-dynamic", "even", "none", "bfloat16"),
    ],
)
def test_scaled(
    site: Site, monkeypatch: pytest.MonkeyPatch, size: str, spec: str, widths: str, tokens: str, dtype: str
) -> None:
    monkeypatch.setitem(cast(dict[str, Any], SPECS), "fp8-tiles-dynamic", (SPECS["fp8-tiles"][0], _TILES))
    element = spec.partition("-")[0]
    _judge(_probe(site, f"triton_{element}_{size}", spec=spec, widths=widths, tokens=tokens, dtype=dtype, bias="bias"))


@pytest.mark.parametrize(
    ("name", "spec", "widths", "tokens", "dtype"),
    [
        ("cuda_fp8_scaled_mm", "fp8-rows-dynamic", "even", "few", "bfloat16"),
        ("cuda_fp8_scaled_mm", "fp8-rows-dynamic", "wide", "none", "bfloat16"),
        ("cuda_fp8_scaled_mm", "fp8-tensor-dynamic", "even", "many", "bfloat16"),
        ("cuda_int8_mm", "int8-dynamic", "even", "few", "bfloat16"),
        ("cuda_int8_mm", "int8-dynamic", "wide", "many", "float32"),
        ("cuda_int8_mm", "int8-dynamic", "even", "none", "float16"),
    ],
)
@pytest.mark.parametrize("bias", ["bias", "no-bias"])
def test_libraries(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, spec: str, widths: str, tokens: str, dtype: str, bias: str
) -> None:
    tensor = SPECS["fp8-tensor"][0], SPECS["fp8-rows-dynamic"][1]
    monkeypatch.setitem(cast(dict[str, Any], SPECS), "fp8-tensor-dynamic", tensor)
    _judge(_probe(site, name, spec=spec, widths=widths, tokens=tokens, dtype=dtype, bias=bias))


@pytest.mark.parametrize("size", ["gemv", "gemm"])
@pytest.mark.parametrize(
    ("element", "group", "zero_point", "widths", "tokens", "dtype"),
    [
        ("uint4", 32, True, "narrow", "few", "bfloat16"),
        ("int4", 64, False, "even", "one", "float16"),
        ("int4", 128, True, "wide", "one", "bfloat16"),
        ("uint4", -1, False, "odd-out", "one", "bfloat16"),
        ("uint4", 32, True, "even", "one", "float32"),
        ("uint4", 32, True, "even", "none", "bfloat16"),
    ],
)
def test_int4(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    element: str,
    group: int,
    zero_point: bool,
    widths: str,
    tokens: str,
    dtype: str,
) -> None:
    spec = QuantSpec(element, scales=(Scale("bfloat16", (1, group)),), zero_point=zero_point)
    monkeypatch.setitem(cast(dict[str, Any], SPECS), "int4", (spec, None))
    _judge(_probe(site, f"triton_int4_{size}", spec="int4", widths=widths, tokens=tokens, dtype=dtype, bias="bias"))


@pytest.mark.parametrize("element", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [(1, -1), (-1, -1)])
@pytest.mark.parametrize("kind", [TritonScaledGemv, TritonScaledGemm, Fp8ScaledMatmul, Int8Matmul])
def test_activations_with_a_scale_of_the_checkpoint(
    site: Site, element: str, rows: tuple[int, int], kind: type[LinearKernel]
) -> None:
    if kind in (Fp8ScaledMatmul, Int8Matmul) and (kind is Int8Matmul) != (element == "int8"):
        return
    weight = QuantSpec(element, scales=(Scale("float32", rows),))
    activation = QuantSpec(element, scales=(Scale("float32", (-1, -1)),))
    workload = LinearWorkload(dtype="bfloat16", in_features=64, out_features=32, spec=(weight, activation))
    generator = torch.Generator().manual_seed(0)
    slots = quantize_weight(torch.randn(32, 64, generator=generator), weight)
    slots["input_scale"] = torch.tensor([0.01 if element == "int8" else 0.003])  # the largest numbers do not fit
    x = torch.randn(5, 64, generator=generator).bfloat16()
    kernel, truth = (made(site.context("bfloat16"), workload) for made in (kind, EmulatedLinear))
    got, wanted = kernel.apply(x, slots, None).double(), truth.apply(x, slots, None).double()
    assert (got - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1024, 1024), (151936, 1024), (1, 8)])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 200])
def test_configurations_are_sound(shape: tuple[int, int], num_rows: int) -> None:
    cut = gemv_configuration(num_rows, shape[0], 2 * shape[1])
    assert cut.rows * cut.block_n <= 16
    assert cut.rows >= min(num_rows, 8)
    assert -(-shape[0] // cut.block_n) >= min(512, shape[0])
