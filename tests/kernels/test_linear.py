"""Linear kernels in the interpreter, held to the error model by the trials that a device would make."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.conformance.checks import values
from hardpoint.conformance.families.linear import LinearProbe, quantized_input, unpack
from hardpoint.conformance.site import Site, Subject
from hardpoint.kernels import gemv as gemv_module
from hardpoint.kernels.block_scaled import TritonScaledGemm, TritonScaledSkinny
from hardpoint.kernels.gemm import GemmConfiguration, gemm
from hardpoint.kernels.gemv import GemvConfiguration, Scales, gemv, gemv_configuration
from hardpoint.kernels.skinny import (
    LARGEST,
    SkinnyConfiguration,
    skinny,
    skinny_configuration,
)
from hardpoint.numerics import quantize_weight
from hardpoint.plugin_host import discover
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint_cuda.linear import Fp8ScaledMatmul, Int8Matmul
from hardpoint_plugin_api import LinearCall, LinearKernel, LinearWorkload, QuantSpec, Scale
from tests.support.specs import SPECS


@pytest.fixture(autouse=True)
def _exact_int8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hosts without VNNI, oneDNN adds pairs of products in 16 bits that saturate, and torch's result is wrong."""
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by programs, so they are large here."""

    def large(num_rows: int, n: int, row_bytes: int, cuts: object = None) -> GemvConfiguration:
        found = gemv_configuration(num_rows, n, row_bytes)
        return found if num_rows <= 2 else replace(found, block_n=16 // found.rows)

    monkeypatch.setattr(gemv_module, "gemv_configuration", large)


def _probe(site: Site, name: str, **row: str) -> LinearProbe:
    offer = next(o for o in site.plugins.offers("linear") if o.contribution.name == name)
    subject = Subject.load(offer, site)
    probe = LinearProbe(
        subject, {"dtype": "bfloat16", "spec": "plain", "bias": "no-bias", "tokens": "one", **row}, SPECS
    )
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


@pytest.mark.parametrize("name", ["triton_gemm", "triton_skinny"])
@pytest.mark.parametrize(
    ("dtype", "widths", "tokens"),
    [("float16", "odd", "few"), ("bfloat16", "wide", "many"), ("bfloat16", "even", "none")],
)
def test_products_of_plain_weights(site: Site, name: str, dtype: str, widths: str, tokens: str) -> None:
    _judge(_probe(site, name, dtype=dtype, widths=widths, tokens=tokens, bias="bias"))


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_gemv_loops_over_columns_and_rows(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (num_rows, 1200), generator=generator).float()[:, ::2]
    weight = torch.randint(-9, 9, (37, 608), generator=generator).float()[:, :600]
    for cut in (GemvConfiguration(2, 16, 1), GemvConfiguration(4, 16, 2, unroll=2)):
        got = gemv(x, weight, None, torch.float32, configuration=cut)
        assert torch.equal(got, x @ weight.T)  # whole numbers: any order of summation is exact


_TILES = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 128)),), static=False)


@pytest.mark.parametrize("size", ["skinny", "gemm"])
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
    monkeypatch.setitem(SPECS, "fp8-tiles-dynamic", (SPECS["fp8-tiles"][0], _TILES))
    element = spec.partition("-")[0]
    _judge(_probe(site, f"triton_{element}_{size}", spec=spec, widths=widths, tokens=tokens, dtype=dtype, bias="bias"))


@pytest.mark.parametrize(
    ("spec", "widths", "dtype"),
    [
        ("int8-dynamic", "odd", "bfloat16"),
        ("int8-groups", "even", "float16"),
        ("fp8-tensor", "narrow", "float16"),
        ("fp8-rows-dynamic", "wide", "bfloat16"),
    ],
)
def test_skinny(site: Site, spec: str, widths: str, dtype: str) -> None:
    name = f"triton_{spec.partition('-')[0]}_skinny"
    _judge(_probe(site, name, spec=spec, widths=widths, tokens="many", dtype=dtype, bias="bias"))


_ELEMENTS = [torch.int8, torch.float8_e4m3fn]


_OPERANDS = [
    (torch.int8, torch.int8),
    (torch.float16, torch.int8),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize(("x_dtype", "element"), _OPERANDS, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "cut"),
    [
        (1, SkinnyConfiguration(1, 2, 2, 1)),
        (9, SkinnyConfiguration(1, 4, 4, 1, early=1)),
        (11, SkinnyConfiguration(2, 2, 1, 1, steps=2, early=2)),
        (11, SkinnyConfiguration(2, 2, 1, 1, steps=2, early=99)),
        (35, SkinnyConfiguration(4, 4, 4, 1, steps=4)),
    ],
)
def test_skinny_loops_over_columns_and_rows(
    x_dtype: torch.dtype, element: torch.dtype, num_rows: int, cut: SkinnyConfiguration
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (num_rows, 1200), generator=generator).to(x_dtype)[:, ::2]
    weight = torch.randint(-9, 9, (37, 608), generator=generator).to(element)[:, :600]
    got = skinny(x, weight, None, torch.float32, configuration=cut)
    assert torch.equal(got, x.float() @ weight.float().T)  # whole numbers: any order of summation is exact


_TILES_OF_ROWS = (
    GemmConfiguration(16, 32, 64, 1, 1),
    GemmConfiguration(16, 64, 64, 1, 1, turned=True),
    GemmConfiguration(8, 32, 64, 1, 1, turned=True, parts=2),
    GemmConfiguration(4, 16, 32, 1, 1, turned=True, parts=4, apart=False),
    GemmConfiguration(2, 8, 128, 1, 1, turned=True, parts=8),
)


@pytest.mark.parametrize(("x_dtype", "element"), [_OPERANDS[0], _OPERANDS[2], _OPERANDS[3]], ids=str)
@pytest.mark.parametrize("cut", _TILES_OF_ROWS, ids=str)
@pytest.mark.parametrize("shape", [(11, 37, 75), (3, 32, 512)])
def test_tiles_loop_over_columns_and_rows(
    x_dtype: torch.dtype, element: torch.dtype, cut: GemmConfiguration, shape: tuple[int, int, int]
) -> None:
    generator, (num_rows, n, k) = torch.Generator().manual_seed(0), shape
    x = torch.randint(-9, 9, (num_rows, 2 * k), generator=generator).to(x_dtype)[:, ::2]
    weight = torch.randint(-9, 9, (n, k + 8), generator=generator).to(element)[:, :k]
    got = gemm(x, weight, None, torch.float32, configuration=cut)
    assert torch.equal(got, x.float() @ weight.float().T)  # whole numbers: any order of summation is exact


@pytest.mark.parametrize("cut", _TILES_OF_ROWS, ids=str)
def test_tiles_scale_rows_and_keep_what_is_not_finite_in_its_row(cut: GemmConfiguration) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (11, 128), generator=generator).float()
    weight = torch.randint(-9, 9, (21, 128), generator=generator).to(torch.float8_e4m3fn)
    x[3, 127], x[9, 0] = float("nan"), float("nan")
    scales, weight_scales = 2.0 ** torch.arange(11.0)[:, None], 2.0 ** -torch.arange(21.0)[:, None]
    codes, bias = x.to(torch.float8_e4m3fn), torch.arange(21.0)
    got = gemm(codes, weight, bias, torch.float32, Scales(scales), Scales(weight_scales), configuration=cut)
    assert got[[3, 9]].isnan().all()
    others = [row for row in range(11) if row not in (3, 9)]
    wanted = x.double() @ weight.double().T * scales * weight_scales.T + bias
    torch.testing.assert_close(got[others].double(), wanted[others], rtol=1e-6, atol=0)


def test_skinny_keeps_what_is_not_finite_in_its_row() -> None:
    x, weight = torch.ones(11, 75, dtype=torch.bfloat16), torch.ones(21, 75, dtype=torch.bfloat16)
    x[3, 74], x[9, 0] = float("nan"), float("inf")
    got = skinny(x, weight, torch.ones(21), torch.bfloat16, configuration=SkinnyConfiguration(1, 2, 2, 1))
    assert got[3].isnan().all()
    assert got[9].isposinf().all()
    assert (got[[row for row in range(11) if row not in (3, 9)]] == 76).all()


@pytest.mark.parametrize("element", _ELEMENTS, ids=str)
def test_skinny_rounds_activations(element: torch.dtype) -> None:
    generator, most = torch.Generator().manual_seed(0), LARGEST[element]
    scale = torch.full((1, 1), 2.0**-5)
    x = (torch.randn(11, 200, generator=generator) * most / 4).clamp_(-most, most)
    x[3] *= 4  # what does not fit becomes the greatest element
    whole = x.round().clamp(-128, 127) if element == torch.int8 else x.clamp(-most, most).to(element)
    x[5, 100] = float("nan")
    weight = torch.randint(-9, 9, (21, 200), generator=generator).to(element)
    cut = SkinnyConfiguration(2, 2, 1, 1)
    scales = Scales(scale, 0)
    got = skinny((x * scale).float(), weight, None, torch.float32, scales, round_x=True, configuration=cut)
    wanted = (whole.double() @ weight.double().T * scale).float()
    others = torch.arange(11) != 5
    assert torch.allclose(got[others], wanted[others], rtol=1e-6, atol=0)
    assert got[5].isnan().all() or element == torch.int8  # which has no such number


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
    monkeypatch.setitem(SPECS, "fp8-tensor-dynamic", tensor)
    _judge(_probe(site, name, spec=spec, widths=widths, tokens=tokens, dtype=dtype, bias=bias))


@pytest.mark.parametrize("name", ["triton_int4", "triton_int4_dequantized"])
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
    name: str,
    element: str,
    group: int,
    zero_point: bool,
    widths: str,
    tokens: str,
    dtype: str,
) -> None:
    spec = QuantSpec(element, scales=(Scale("bfloat16", (1, group)),), zero_point=zero_point)
    monkeypatch.setitem(SPECS, "int4", (spec, None))
    _judge(_probe(site, name, spec="int4", widths=widths, tokens=tokens, dtype=dtype, bias="bias"))


@pytest.mark.parametrize("element", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [(1, -1), (-1, -1)])
@pytest.mark.parametrize("kind", [TritonScaledSkinny, TritonScaledGemm, Fp8ScaledMatmul, Int8Matmul])
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
    got, wanted = kernel.apply(LinearCall(x, slots)).double(), truth.apply(LinearCall(x, slots, None)).double()
    assert (got - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1024, 1024), (151936, 1024), (1, 8)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 200])
def test_configurations_are_sound(shape: tuple[int, int], num_rows: int) -> None:
    cut = gemv_configuration(num_rows, shape[0], 2 * shape[1])
    assert cut.rows * cut.block_n <= 16
    assert cut.rows >= min(num_rows, 8)
    assert -(-shape[0] // cut.block_n) >= min(512, shape[0])


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1024, 1024), (28672, 4096), (1, 8)])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 32, 200])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_skinny_configurations_fit_shared_memory(shape: tuple[int, int], num_rows: int, itemsize: int) -> None:
    cut = skinny_configuration(num_rows, shape[0], itemsize)
    assert 8 * cut.x_tiles >= min(num_rows, 32)
    block = 64 * cut.num_warps * cut.steps * 8 * (cut.weight_tiles + itemsize * cut.x_tiles)
    assert block * (cut.num_stages - 1) <= 1024 * (96 if num_rows <= 8 else 224)
