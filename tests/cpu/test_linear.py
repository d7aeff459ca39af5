"""The compiled linear and experts kernels beside dequantized products in double precision, at every level there is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from hardpoint.conformance.families.experts import ExpertsProbe
from hardpoint.conformance.families.ops import batch_invariant
from hardpoint.conformance.site import Site, Subject
from hardpoint.conformance.trials import Finding
from hardpoint.dtypes import dtype_name
from hardpoint.numerics import fake_quantize, quantize_rows, quantize_weight
from hardpoint.ops.judge import judge_call
from hardpoint.plugin_host import discover
from hardpoint_cpu import native
from hardpoint_cpu.float8_linear import Float8PanelLinear
from hardpoint_cpu.linear import (
    Int4PanelLinear,
    Int8PanelLinear,
    Int8WeightPanelLinear,
    Mxfp4PanelLinear,
    NibblePanelLinear,
    Nvfp4PanelLinear,
    PanelLinear,
    PlainPanelLinear,
)
from hardpoint_plugin_api import (
    BuildContext,
    Feature,
    LinearCall,
    LinearWorkload,
    QuantSpec,
    Scale,
    dequantize,
)
from tests.cpu.building import needs_kernels
from tests.support.specs import SPECS

needs_kernels()


_ROWS = (1, 3, 5, 7, 13, 200)
_INT8 = QuantSpec("int8", scales=(Scale("float32", (1, -1)),))
_FP8 = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, -1)),))
_FP8_BLOCKS = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (24, 40)),))  # no multiples of panels or marks
_GROUPS, _SMALL_GROUPS = ((Scale("bfloat16", (1, columns)),) for columns in (32, 8))
_MX = (Scale("float8_e8m0fnu", (1, 32)),)
_NV = (Scale("float8_e4m3fn", (1, 16)), Scale("float32", (-1, -1)))


@dataclass(frozen=True)
class Context:
    """The build context as a linear kernel uses it."""

    dtype: torch.dtype
    torch_device: torch.device = field(default=torch.device("cpu"))


def _pairs(dtype: torch.dtype) -> dict[str, tuple[type[PanelLinear], tuple[QuantSpec, QuantSpec]]]:
    plain = QuantSpec(dtype_name(dtype))
    dynamic = QuantSpec("int8", scales=_INT8.scales, static=False)
    return {
        "plain": (PlainPanelLinear, (plain, plain)),
        "int8": (Int8PanelLinear, (_INT8, dynamic)),
        "int8-weight": (Int8WeightPanelLinear, (_INT8, plain)),
        "uint4-asym": (Int4PanelLinear, (QuantSpec("uint4", scales=_GROUPS, zero_point=True), plain)),
        "int4": (Int4PanelLinear, (QuantSpec("int4", scales=_GROUPS), plain)),
        "int4-small-groups": (Int4PanelLinear, (QuantSpec("int4", scales=_SMALL_GROUPS), plain)),
        "mxfp4": (Mxfp4PanelLinear, (QuantSpec("float4_e2m1", scales=_MX), plain)),
        "nvfp4": (Nvfp4PanelLinear, (QuantSpec("float4_e2m1", scales=_NV), plain)),
        "fp8": (Float8PanelLinear, (_FP8, plain)),
        "fp8-tensor-dynamic": (
            Float8PanelLinear,
            (replace(_FP8, scales=(Scale("float32", (-1, -1)),)), replace(_FP8, static=False)),
        ),
        "fp8-blocks": (Float8PanelLinear, (_FP8_BLOCKS, plain)),
        "fp8-blocks-dynamic": (
            Float8PanelLinear,
            (_FP8_BLOCKS, replace(_FP8, scales=(Scale("float32", (1, 40)),), static=False)),
        ),
        "uint4-rows": (Int4PanelLinear, (QuantSpec("uint4", scales=(Scale("float32", (1, -1)),)), plain)),
    }


def _kernel(
    kind: type[PanelLinear], pair: tuple[QuantSpec, QuantSpec], n: int, k: int, dtype: torch.dtype, *features: Feature
) -> PanelLinear:
    workload = LinearWorkload(
        dtype=dtype_name(dtype), in_features=k, out_features=n, spec=pair, features=frozenset(features)
    )
    assert not kind.supports(workload, cast(Any, None))
    return kind(cast(BuildContext, Context(dtype)), workload)


def _slots(n: int, k: int, spec: QuantSpec, dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return {"weight": weight} if spec.is_plain else quantize_weight(weight, spec)


@pytest.mark.parametrize("name", list(_pairs(torch.float32)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_multiplies_as_its_spec_says(level: str, name: str, dtype: torch.dtype) -> None:
    kind, pair = _pairs(dtype)[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 64), (70, 1312)]  # a panel that is not full; more columns than one block has
    if not issubclass(kind, NibblePanelLinear):
        shapes.append((20, 66))  # columns that are no multiple of 4
    for n, k in shapes:
        slots = _slots(n, k, pair[0], dtype, generator)
        numbers = dequantize(slots, pair[0], torch.float64)
        kernel, bias = _kernel(kind, pair, n, k, dtype), torch.randn(n, generator=generator).to(dtype)
        weights = kernel.prepack({slot: value.clone() for slot, value in slots.items()})
        assert torch.equal(kernel.unpack(weights), dequantize(slots, pair[0], dtype))
        ids = torch.tensor([n - 1, 0, 17])
        assert torch.equal(kernel.rows(weights, ids), dequantize(slots, pair[0], dtype, ids))
        for rows in _ROWS:
            x = torch.randn(rows, k, generator=generator).to(dtype)
            wanted = fake_quantize(x, pair[1], {}).double() @ numbers.T
            for given, more in ((None, 0.0), (bias, bias.double())):
                got = kernel.apply(LinearCall(x, weights, given)).double()
                # Each product of a sum may be off by a unit of the activations' dtype; most errors cancel. Codes are
                # multiplied less 8, and what that leaves out, up to eight times the sum of x, is added in float32.
                limit = 4 * torch.finfo(dtype).eps * (wanted.abs().amax() + 1) + 1.5e-5 * k**0.5
                assert (got - wanted - more).abs().max() <= limit, (n, k, rows)


@pytest.mark.parametrize("name", ["uint4-asym", "uint4-rows", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_odd_sizes_stay_apart(level: str, name: str, dtype: torch.dtype) -> None:
    """Some levels round activations to 16-bit integers: a row's scales must be its own, whatever its numbers are."""
    kind, pair = _pairs(dtype)[name]
    generator = torch.Generator().manual_seed(0)
    slots = _slots(40, 768, pair[0], dtype, generator)
    numbers, kernel = dequantize(slots, pair[0], torch.float64), _kernel(kind, pair, 40, 768, dtype)
    weights = kernel.prepack(slots)
    x = torch.randn(6, 768, generator=generator)
    x[0], x[1, 3], x[2, 700], x[3] = 0, torch.nan, torch.inf, x[3] * 1e-4
    x[4, 40] = 1e4  # of which the others in its group are a small part
    x = x.to(dtype)
    got, wanted = kernel.apply(LinearCall(x, weights)).double(), x.double() @ numbers.T
    assert bool(got[1].isnan().all())
    assert not bool(got[2].isfinite().any())
    for row in (0, 3, 4, 5):
        limit = 4 * torch.finfo(dtype).eps * wanted[row].abs().amax()
        assert (got[row] - wanted[row]).abs().max() <= limit, row


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_of_a_scale_of_one_byte_is_its_number(level: str, name: str, dtype: torch.dtype) -> None:
    """Row i has a group with code i. For one row of x, codes that are no plain number have a kernel of their own."""
    kind, pair = _pairs(dtype)[name]
    generator = torch.Generator().manual_seed(0)
    slots = _slots(256, 128, pair[0], torch.float32, generator)
    codes = slots["weight_scale"].view(torch.uint8)
    codes[:, 1] = torch.arange(256, dtype=torch.uint8)
    numbers = dequantize(slots, pair[0], torch.float64)
    kernel = _kernel(kind, pair, 256, 128, dtype)
    weights = kernel.prepack({slot: value.clone() for slot, value in slots.items()})
    for rows in (1, 5):
        x = (torch.randn(rows, 128, generator=generator) / 256).to(dtype)  # within the range of float32 with any scale
        got, wanted = kernel.apply(LinearCall(x, weights)), (x.double() @ numbers.T).to(dtype)
        limit = 4 * torch.finfo(dtype).eps * (x.double().abs() @ numbers.abs().T)
        same = (got.double() - wanted.double()).abs() <= limit.nan_to_num(0)
        assert bool((same | (got == wanted) | (got.isnan() & wanted.isnan())).all()), rows
        assert bool(wanted[:, 127 if name == "nvfp4" else 255].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_of_fp8_is_its_number(level: str, dtype: torch.dtype) -> None:
    """Codes that are subnormal, too; for one row and for more, with numbers of x at the ends of its dtype's range."""
    plain = QuantSpec(dtype_name(dtype))
    codes = torch.arange(256, dtype=torch.uint8).repeat(40, 1)
    codes[:, (codes[0] & 0x7F) == 0x7F] = 0
    slots = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.full((40, 1), 2.0)}
    kernel = _kernel(Float8PanelLinear, (_FP8, plain), 40, 256, dtype)
    weights = kernel.prepack({name: value.clone() for name, value in slots.items()})
    numbers = slots["weight"].double() * 2
    assert torch.equal(kernel.unpack(weights).double(), numbers)
    smallest, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max / 1024
    for rows in (1, 2, 7):
        for unit in (smallest * 512, 1.0, largest):
            for column in (1, 7, 8, 0x7E, 0x81, 0xFE):
                x = torch.zeros(rows, 256, dtype=dtype)
                x[:, column] = unit
                got = kernel.apply(LinearCall(x, weights)).double()
                assert torch.equal(got, (x.double() @ numbers.T).to(dtype).double()), (rows, unit, column)


def test_a_row_with_a_code_that_is_no_number_becomes_none(level: str) -> None:
    plain, weight = QuantSpec("float32"), torch.ones(40, 64).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[5, 9] = 0xFF
    kernel = _kernel(Float8PanelLinear, (_FP8, plain), 40, 64, torch.float32)
    weights = kernel.prepack({"weight": weight, "weight_scale": torch.ones(40, 1)})
    for rows in (1, 7):
        got = kernel.apply(LinearCall(torch.ones(rows, 64), weights))
        assert bool(got[:, 5].isnan().all())
        assert bool((got[:, torch.arange(40) != 5] == 64).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_activations_are_rounded_as_they_are_elsewhere(level: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = (Scale("float32", (-1, -1)),)
    x = torch.randn(5, 3, 130, generator=generator).to(dtype)
    x[0, 0], x[1, 0, 7], x[2, 0, 8] = 0, torch.nan, 2e4
    for activation in (
        QuantSpec("float8_e4m3fn", scales=tensor),
        replace(_FP8, static=False),
        QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 128)),), static=False),
    ):
        kernel = _kernel(Float8PanelLinear, (_FP8, activation), 40, 130, dtype)
        assert isinstance(kernel, Float8PanelLinear)
        given = {"input_scale": torch.tensor([0.0125])}
        slots = _slots(40, 130, _FP8, dtype, generator) | (given if activation.static else {})
        weights = kernel.prepack(slots)
        wanted = fake_quantize(x.flatten(0, 1), activation, given).view(x.shape)
        assert torch.equal(kernel.rounded(x, weights).nan_to_num(7), wanted.nan_to_num(7)), activation
        plain = _kernel(Float8PanelLinear, (_FP8, QuantSpec(dtype_name(dtype))), 40, 130, dtype)
        found = kernel.apply(LinearCall(x, weights)), plain.apply(LinearCall(wanted, weights))
        assert torch.equal(found[0].nan_to_num(7), found[1].nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_takes_rounded_activations_as_it_rounds_them(level: str, dtype: torch.dtype) -> None:
    kind, pair = _pairs(dtype)["int8"]
    generator = torch.Generator().manual_seed(0)
    kernel = _kernel(kind, pair, 40, 66, dtype)
    weights = kernel.prepack(_slots(40, 66, pair[0], dtype, generator))
    x = torch.randn(7, 66, generator=generator).to(dtype)
    x[3] = 0
    assert kernel.input_spec is not None
    rounded = quantize_rows(x, kernel.input_spec, {})
    given = LinearCall(rounded.codes, weights, scales=rounded.scale)
    assert torch.equal(kernel.apply(given), kernel.apply(LinearCall(x, weights)))


@pytest.mark.parametrize("name", list(_pairs(torch.float32)))
def test_a_row_has_the_same_bits_whoever_is_with_it(level: str, name: str) -> None:
    kind, pair = _pairs(torch.bfloat16)[name]
    generator = torch.Generator().manual_seed(0)
    kernel = _kernel(kind, pair, 40, 1120, torch.bfloat16, Feature.BATCH_INVARIANT)
    weights = kernel.prepack(_slots(40, 1120, pair[0], torch.bfloat16, generator))
    x = torch.randn(200, 1120, generator=generator).bfloat16()
    whole = kernel.apply(LinearCall(x, weights))
    for rows in (slice(0, 1), slice(150, 153), slice(7, 20)):
        assert torch.equal(kernel.apply(LinearCall(x[rows], weights)), whole[rows])


@pytest.mark.parametrize(
    ("name", "columns", "reason"),
    [
        ("plain", 33, "bfloat16 is read in pairs (wanted 33, supported even)"),
        ("int8-weight", 33, "bfloat16 is read in pairs"),
        ("fp8", 33, "bfloat16 is read in pairs"),
        ("fp8-odd-blocks", 64, "groups of columns (wanted 30, supported a multiple of 4)"),
        ("fp8-two-scales", 64, "scales of an element (wanted 2, supported 1)"),
        ("int8", 131_072, "sums of whole numbers have 32 bits (wanted 131072, supported up to 131071)"),
        ("int4", 48, "groups of columns (wanted 32 of 48, supported a multiple of 8 that divides the columns)"),
    ],
)
def test_shapes_that_it_cannot_pack_are_refused(name: str, columns: int, reason: str) -> None:
    odd, plain = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 30)),)), QuantSpec("bfloat16")
    more = {"fp8-odd-blocks": (Float8PanelLinear, (odd, plain))}
    more |= {"fp8-two-scales": (Float8PanelLinear, (replace(odd, scales=_NV), plain))}
    kind, pair = (_pairs(torch.bfloat16) | more)[name]
    workload = LinearWorkload(dtype="bfloat16", in_features=columns, out_features=16, spec=pair)
    (found,) = kind.supports(workload, cast(Any, None))
    assert reason in str(found)


_EXPERTS = {
    "plain": ("cpu_native", "plain"),
    "int8": ("cpu_native_int8", "int8-dynamic"),
    "int4": ("cpu_native_int4", "uint4-groups"),
    "mxfp4": ("cpu_native_mxfp4", "mxfp4"),
    "nvfp4": ("cpu_native_nvfp4", "nvfp4"),
}


@pytest.fixture(scope="module")
def site() -> Site:
    """Opened before a level is chosen, since it chooses one itself: the one in use, as it leaves the threads alone."""
    return Site.open(discover(), "cpu", {"cpu": {"threads": torch.get_num_threads(), "isa": native.level()}})


def _experts(site: Site, name: str, **row: str) -> ExpertsProbe:
    kernel, spec = _EXPERTS[name]
    offer = next(o for o in site.plugins.offers("experts") if o.contribution.name == kernel)
    return ExpertsProbe(Subject.load(offer, site), {"spec": spec, "format": "standard"} | row, SPECS)


@pytest.mark.parametrize("name", _EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_what_the_reference_makes(site: Site, level: str, name: str, dtype: torch.dtype) -> None:
    common = {"dtype": dtype_name(dtype), "activation": "silu_and_mul", "mixture": "8x2", "widths": "even"}
    tried = 0
    for batch, bias in (("one", "bias"), ("few", "no-bias"), ("many", "bias")):
        probe = _experts(site, name, batch=batch, bias=bias, absent="some-elsewhere", **common)
        if probe.subject.refuses(probe.workload) is None:
            finding = Finding.of(judge_call(probe.call(3)))
            assert not finding.faults, finding
            tried += 1
    assert tried
    assert native.level() == level


@pytest.mark.parametrize("name", _EXPERTS)
def test_a_row_of_experts_has_the_same_bits_whoever_is_with_it(site: Site, level: str, name: str) -> None:
    """Its activation in between as well: torch's, which a context serves, is not so unless it is told."""
    common = {
        "activation": "gelu_tanh",
        "batch": "few",
        "mixture": "8x2",
        "widths": "even",
        "absent": "here",
        "bias": "no-bias",
    }
    for dtype in ("float32", "bfloat16"):
        probe = _experts(site, name, dtype=dtype, **common)
        assert probe.subject.refuses(probe.workload) is None
        finding = batch_invariant(probe, 0)
        assert not finding.faults, finding
