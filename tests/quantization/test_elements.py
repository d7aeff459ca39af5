"""Elements: what their codes mean, how they round, and that any spec of one can be quantized to and read back."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

from hardpoint.conformance.families.rounding_bound import rounding_bound
from hardpoint.dtypes import dtype_of
from hardpoint.numerics import calibrate, fake_quantize, quantize_weight
from hardpoint.plugin_host.discovery import discover
from hardpoint.quantization import elements
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint_plugin_api import (
    Element,
    LinearWorkload,
    ManifestError,
    QuantSpec,
    Scale,
    Scheme,
    TableElement,
    UnknownNameError,
    decode_elements,
    dequantize,
    parse_manifest,
    weight_slots,
)
from hardpoint_plugin_api.elements import BUILT_IN
from tests.selection.fakes import TOY

NF4 = TableElement(
    "nf4",
    4,
    table=(
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""The constants of bitsandbytes, for QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""

LEVELS = {
    "rows": [Scale("float32", (1, -1))],
    "tiles": [Scale("bfloat16", (8, 16))],
    "mx": [Scale("float8_e8m0fnu", (1, 32))],
    "nvfp4": [Scale("float8_e4m3fn", (1, 16)), Scale("float32", (-1, -1))],
    "double": [Scale("float16", (1, 16)), Scale("float32", (8, -1))],
}
WEIGHT = torch.randn(41, 64, generator=torch.Generator().manual_seed(0))
ALL = [*BUILT_IN.values(), NF4]


def named(element: Element) -> str:
    return element.name


def test_the_tables_are_those_of_their_sources() -> None:
    """e2m1: sign, two bits of exponent with bias 1, one of mantissa. NF4: quantiles of N(0, 1), eight above zero and
    seven below, between 1 - 0.9677083 and 0.9677083, over the largest of them."""
    e2m1 = [(code & 1) / 2 if code < 2 else (1 + (code & 1) / 2) * 2 ** ((code >> 1) - 1) for code in range(8)]
    read = BUILT_IN["float4_e2m1"].decode(torch.arange(16), torch.float64).tolist()
    assert read == e2m1 + [-value for value in e2m1]
    quantile = NormalDist().inv_cdf
    above = [quantile(0.9677083 + (0.5 - 0.9677083) * i / 8) for i in range(8)]
    below = [-quantile(0.9677083 + (0.5 - 0.9677083) * i / 7) for i in range(7)]
    derived = [value / above[0] for value in sorted([*above, 0.0, *below])]
    assert NF4.table == pytest.approx(derived, abs=1e-6)


@pytest.mark.parametrize("element", ALL, ids=named)
def test_rounding_takes_the_nearest_value(element: Element) -> None:
    values = torch.tensor(element.values, dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2
    reach = element.largest * 1.5
    x = torch.cat([values, middles, middles * (1 + 1e-6), torch.linspace(-reach, reach, 999)]).float()
    codes = element.encode(x)
    assert dtype_of(element.storage) == codes.dtype
    got = element.decode(codes, torch.float64)
    nearest = (x.double()[:, None] - values).abs().amin(1)
    assert torch.equal((got - x.double()).abs(), nearest)
    again = element.decode(element.encode(got.float()), torch.float64)
    assert torch.equal(again, got)


def test_ties_go_to_even_codes() -> None:
    half = TableElement("half", 2, table=(0.0, 1.0, 2.0, 3.0))
    assert half.encode(torch.tensor([0.5, 1.5, 2.5])).tolist() == [0, 2, 2]
    fours = BUILT_IN["float4_e2m1"].encode(torch.tensor([0.25, 0.75, 5.0, -0.25, -5.0]))
    assert fours.tolist() == [0, 2, 6, 8, 14]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("element", ALL, ids=named)
def test_every_spec_can_be_quantized_to(element: Element, levels: str) -> None:
    """The slots are the spec's; no number is further off than rounding allows, and some are nearly as far."""
    for zero_point, permuted in itertools.product((False, True), repeat=2):
        if zero_point and not element.takes_zero_point:
            continue
        spec = QuantSpec.of(element, LEVELS[levels], zero_point=zero_point, permuted=permuted)
        weight = WEIGHT if zero_point or element.values[0] < 0 else WEIGHT.abs()
        slots = quantize_weight(weight, spec)
        wanted = weight_slots(Scheme(spec, QuantSpec("float32")), [("", 41)], 64)
        assert {name: dtype_of(slot.dtype) for name, slot in wanted.items()} == {n: x.dtype for n, x in slots.items()}
        assert all(slots[name].shape == slot.shape[-slots[name].dim() :] for name, slot in wanted.items())
        limit = rounding_bound(weight.double(), spec, slots.get("weight_group_index"))
        assert limit is not None
        error = (dequantize(slots, spec, torch.float64) - weight).abs()
        assert float((error / limit).max()) <= 1, spec
        if levels == "rows":  # scales of other formats have roundings of their own
            assert float((error / limit).max()) > 0.45, spec
            coarse = {**slots, "weight_scale": slots["weight_scale"] * (1.1 if element.bits > 3 else 2)}
            assert ((dequantize(coarse, spec, torch.float64) - weight).abs() > limit).any(), spec


@pytest.mark.parametrize("element", ["int4", "int8"])
@pytest.mark.parametrize("lowest", [True, False], ids=["to the lowest", "without the lowest"])
def test_the_largest_number_may_not_be_clipped(element: str, lowest: bool) -> None:
    """A scale by which the largest magnitude is the lowest element is negative where that number is positive."""
    spec = QuantSpec(element, scales=(Scale("float32", (1, 32)),))
    most = -int(spec.number_format.values[0])
    groups = WEIGHT.double().unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / most
    codes = (groups / scale).round().clamp(-most if lowest else 1 - most, most - 1)
    limit = rounding_bound(WEIGHT.double(), spec)
    assert limit is not None
    assert (((codes * scale).flatten(1) - WEIGHT).abs() > limit).any()


@pytest.mark.parametrize(
    ("element", "levels", "step"),
    [
        ("uint4", [Scale("uint8", (1, 16)), Scale("float16", (1, 32))], 1 / 15),
        ("uint2", [Scale("uint8", (1, 16)), Scale("float16", (1, 64))], 1 / 3),
        ("uint5", [Scale("float16", (1, 32))], 1 / 31),
    ],
)
def test_minima_shift_each_block(element: str, levels: list[Scale], step: float) -> None:
    """GGUF's K-quants: the least number of a block is its minimum, to half a step of each level's own rounding."""
    spec = QuantSpec(element, scales=tuple(levels), minimum=True)
    slots = quantize_weight(WEIGHT, spec)
    wanted = weight_slots(Scheme(spec, QuantSpec("float32")), [("", 41)], 64)
    assert {n: (s.shape, s.dtype) for n, s in wanted.items()} == {
        n: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for n, x in slots.items()
    }
    blocks = WEIGHT.unflatten(1, (-1, levels[0].block[1]))
    span = blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True).clamp(max=0)
    error = (dequantize(slots, spec, torch.float64).unflatten(1, blocks.shape[1:]) - blocks).abs()
    assert float((error / (span * step)).max()) <= 0.65
    assert torch.equal(dequantize(slots, spec, torch.float32, slice(3, 9)), dequantize(slots, spec, torch.float32)[3:9])


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("int8", scales=(Scale("float32", (-1, -1)),)),
        QuantSpec("uint8", scales=(Scale("float32", (-1, -1)),), zero_point=True),
        QuantSpec("float4_e2m1", scales=tuple(LEVELS["nvfp4"]), static=False),
        QuantSpec.of(NF4, [Scale("float32", (1, 16))], static=False),
    ],
    ids=str,
)
def test_activations_can_be_calibrated(spec: QuantSpec) -> None:
    """``calibrate`` makes what the loader would ask the checkpoint for."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    given = calibrate(x, spec)
    wanted = weight_slots(Scheme(QuantSpec("float32"), spec), [("", 8)], 64)
    assert {name: (1,) for name in wanted if name.startswith("input_")} == {n: tuple(v.shape) for n, v in given.items()}
    close = fake_quantize(x, spec, given)
    assert float((close - x).norm() / x.norm()) < 0.12
    assert not torch.equal(close, x)


def test_plugins_offer_them_and_core_is_one() -> None:
    plugins = discover()
    assert set(elements.known_elements(plugins)) >= set(BUILT_IN)
    for name, built_in in BUILT_IN.items():
        assert elements.element(name, plugins) is built_in
    with pytest.raises(UnknownNameError, match=r"unknown element 'nf5'.*family 'element'.*QuantSpec\.of"):
        elements.element("nf5", plugins)


def test_a_name_alone_is_not_known() -> None:
    """A spec that names an element which nobody defined: the emulation refuses it, and reading it says what to do."""
    spec = QuantSpec("nf4", packing="nibbles", scales=tuple(LEVELS["rows"]))
    assert spec == QuantSpec.of(NF4, LEVELS["rows"])
    stored = torch.zeros(2, 4, dtype=torch.uint8)
    for use in (lambda: decode_elements(stored, spec, torch.float32), lambda: quantize_weight(torch.ones(2, 8), spec)):
        with pytest.raises(UnknownNameError, match=r"unknown element 'nf4'.*hardpoint\.toml.*QuantSpec\.of"):
            use()
    workload = LinearWorkload(dtype="float32", spec=(spec, QuantSpec("float32")))
    (reason,) = EmulatedLinear.supports(workload, TOY)
    assert "nobody says what the weight's elements mean" in reason.message
    defined = replace(workload, spec=(QuantSpec.of(NF4, LEVELS["rows"]), QuantSpec("float32")))
    assert EmulatedLinear.supports(defined, TOY) == []


def test_a_spec_carries_its_element_to_other_processes() -> None:
    spec = QuantSpec.of(NF4, LEVELS["rows"])
    assert pickle.loads(pickle.dumps(spec)).number_format == NF4
    assert replace(spec, static=False).number_format is NF4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TableElement("x", 4, table=(0.0, 1.0)), "has 16 codes, its table 2 values"),
        (lambda: TableElement("x", 9, table=()), "has 9 bits; 1 to 8"),
        (lambda: TableElement("x@y", 1, table=(0.0, 1.0)), "'x@y' cannot be written in a spec"),
        (lambda: quantize_weight(torch.ones(2, 7), QuantSpec.of(NF4, LEVELS["rows"])), "K must be even, got 7"),
        (
            lambda: quantize_weight(torch.ones(2, 8), QuantSpec.of(NF4, LEVELS["rows"], zero_point=True)),
            "zero points need elements that are consecutive whole numbers",
        ),
        (
            lambda: quantize_weight(
                torch.ones(2, 8),
                QuantSpec.of(NF4, [Scale("float32", (1, 2)), Scale("float32", (1, 4))], permuted=True),
            ),
            "one group index cannot serve groups of 2 and 4",
        ),
    ],
)
def test_bad_ones_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


MANIFEST = """
schema = 1
api = "0.2"
[plugin]
name = "acme"
[[contribution]]
family = "element"
name = "nf4"
target = "acme.formats:NF4"
"""


def test_nobody_replaces_one() -> None:
    assert parse_manifest(MANIFEST, "here").contributions[0].name == "nf4"
    with pytest.raises(ManifestError, match="'replaces': an element's name says what stored numbers mean"):
        parse_manifest(MANIFEST + 'replaces = "int8"\n', "here")
