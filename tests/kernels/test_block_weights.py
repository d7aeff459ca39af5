"""Products with weights in GGUF's blocks, in the interpreter, beside the weights dequantized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.conformance.site import Site
from hardpoint.kernels.block_tuning import BlockCut
from hardpoint.kernels.block_weights import TritonBlockLinear, block_matmul, block_numbers
from hardpoint.numerics import quantize_weight
from hardpoint.plugin_host import discover
from hardpoint_cuda.platform import describe_arch
from hardpoint_plugin_api import LinearWorkload, QuantSpec, Scale, dequantize

_TYPES = (
    *("Q4_K", "Q5_0", "Q6_K", "Q2_K"),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("Q4_1", "Q5_1", "Q3_K", "Q5_K")),
)
_DEVICE = describe_arch("H100", (9, 0))
_CUTS = {
    "one row": BlockCut(1, 64, 4, 1),
    "pieces": BlockCut(8, 64, 4, 1, pieces=4),
    "numbers first": BlockCut(16, 64, 4, 1, numbers_first=True),
}


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


def _kernel(site: Site, spec: QuantSpec, dtype: str, n: int, k: int) -> TritonBlockLinear:
    return TritonBlockLinear(
        site.context(dtype), LinearWorkload(dtype=dtype, in_features=k, out_features=n, spec=(spec, QuantSpec(dtype)))
    )


def _weight(n: int, k: int) -> torch.Tensor:
    """Groups of unlike magnitudes, some of which have minima far from zero."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(n, k, generator=generator)
    steps = torch.arange(k) // 16
    return drawn * 2.0 ** (steps % 5 - 2) + (steps % 3 - 1)


@pytest.mark.parametrize(
    ("dtype", "title"),
    [*(("bfloat16", title) for title in _CUTS), ("float16", "one row"), ("float32", "numbers first")],
)
@pytest.mark.parametrize("name", _TYPES)
def test_products(site: Site, name: str, dtype: str, title: str) -> None:
    spec, cut = SPECS[name].spec, _CUTS[title]
    n, k, number = 37, 512 if len(spec.scales) > 1 else 480, getattr(torch, dtype)
    slots = quantize_weight(_weight(n, k), spec)
    kernel = _kernel(site, spec, dtype, n, k)
    packed = kernel.prepack(slots)
    plain = dequantize(slots, spec, torch.float64)
    assert torch.equal(kernel.unpack(packed), dequantize(slots, spec, number))
    ids = torch.tensor([36, 0, 17, 17])
    assert torch.equal(kernel.rows(packed, ids), kernel.unpack(packed)[ids])

    x = torch.randn(5, 2 * k, generator=torch.Generator().manual_seed(1)).to(number)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(number)
    for rows, added in ((x[:, :k], bias), (x[:1, ::2], None)):
        got = block_matmul(rows, packed, added, kernel.tiles, cut)
        wanted = rows.double() @ plain.T + (0 if added is None else added.double())
        # Elements and scales are exact. Left are the sum in float32, and roundings of the result and of numbers.
        rounding = torch.finfo(number).eps
        each = 2e-6 + (rounding if cut.numbers_first else 0)
        bound = each * (rows.double().abs() @ plain.abs().T + wanted.abs()) + rounding * wanted.abs()
        assert ((got.double() - wanted).abs() <= bound).all()
    assert block_matmul(x[:0, :k], packed, bias, kernel.tiles).shape == (0, n)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", _TYPES)
def test_numbers(site: Site, name: str, dtype: str) -> None:
    spec, number = SPECS[name].spec, getattr(torch, dtype)
    slots = quantize_weight(_weight(19, 512), spec)
    kernel = _kernel(site, spec, dtype, 19, 512)
    got = block_numbers(kernel.prepack(slots), kernel.tiles, number).double()
    wanted = dequantize(slots, spec, torch.float64)
    assert ((got - wanted).abs() <= torch.finfo(number).eps * wanted.abs() + 1e-6 * wanted.abs().amax()).all()


class _Largest(TorchDispatchMode):
    """Notes the bytes of the largest result of an operation."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_a_weight_is_laid_out_some_rows_at_a_time(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more memory than the weight itself, however large that is; and the pieces are as the whole."""
    spec = SPECS[name].spec
    slots = quantize_weight(_weight(200, 512), spec)
    kernel = _kernel(site, spec, "bfloat16", 200, 512)
    whole = kernel.prepack(slots)
    monkeypatch.setattr("hardpoint.kernels.block_tiles._PIECE", 32 * 512)
    with _Largest() as seen:  # type: ignore[no-untyped-call]  # the mode of torch has no types
        pieces = kernel.prepack(slots)
    assert all(torch.equal(whole[slot], pieces[slot]) for slot in whole)
    # The weight itself as it was and as it is, and 32 bits for each element of a piece.
    assert seen.nbytes <= max(4 * 32 * 512, pieces["weight"].nbytes, slots["weight"].nbytes)


@pytest.mark.parametrize("format_", ["bfloat16", "float8_e4m3fn"])
def test_scales_that_a_record_does_not_hold_are_refused(format_: str) -> None:
    spec = replace(SPECS["Q5_0"].spec, scales=(Scale(format_, (1, 32)),))
    workload = LinearWorkload(dtype="bfloat16", in_features=64, out_features=16, spec=(spec, QuantSpec("bfloat16")))
    assert [reason.code for reason in TritonBlockLinear.supports(workload, _DEVICE)] == ["group"]


def test_codes_at_the_ends_of_their_range(site: Site) -> None:
    """All codes of six bits, and scales at both ends of int8."""
    spec = SPECS["Q6_K"].spec
    slots = {
        "weight": (torch.arange(256) % 64 - 32).to(torch.int8).expand(16, 256).contiguous(),
        "weight_scale": torch.tensor([-128, 127]).to(torch.int8).repeat(16, 8),
        "weight_scale_2": torch.full((16, 1), 2.0**-7, dtype=torch.float16),
    }
    kernel = _kernel(site, spec, "float32", 16, 256)
    identity = torch.eye(256)
    got = block_matmul(identity, kernel.prepack(slots), None, kernel.tiles)
    assert torch.equal(got.T, dequantize(slots, spec, torch.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_all_codes_of_eight_bits(site: Site, dtype: str) -> None:
    spec, numbers = SPECS["Q8_0"].spec, getattr(torch, dtype)
    codes = (torch.arange(256) - 128).to(torch.int8).expand(16, 256).contiguous()
    slots = {"weight": codes, "weight_scale": torch.full((16, 8), 2.0**-7, dtype=torch.float16)}
    kernel = _kernel(site, spec, dtype, 16, 256)
    packed = kernel.prepack(slots)
    got = block_matmul(torch.eye(256, dtype=numbers), packed, None, kernel.tiles)
    wanted = dequantize(slots, spec, numbers)
    assert torch.equal(got.T, wanted)
    assert torch.equal(kernel.unpack(packed), wanted)


def test_what_is_no_block_is_refused() -> None:
    def reasons(spec: QuantSpec, k: int) -> list[str]:
        workload = LinearWorkload(dtype="bfloat16", in_features=k, out_features=16, spec=(spec, QuantSpec("bfloat16")))
        return [reason.code for reason in TritonBlockLinear.supports(workload, _DEVICE)]

    q6, q5 = SPECS["Q6_K"].spec, SPECS["Q5_0"].spec
    assert reasons(q6, 512) == reasons(q5, 96) == []
    assert reasons(q6, 384) == ["columns"]
    assert reasons(q5, 80) == ["columns"]
    assert reasons(QuantSpec("float8_e4m3fn", scales=(Scale("float16", (1, 32)),)), 64) == ["element"]
    assert reasons(QuantSpec("float4_e2m1", scales=(Scale("float16", (1, 32)),)), 64) == ["element"]
    assert reasons(replace(q5, scales=(Scale("float32", (1, 32)),)), 64) == ["group"]
    assert reasons(replace(q5, scales=(Scale("float16", (1, 64)),)), 64) == ["group"]
    assert reasons(replace(q6, scales=(q6.scales[0], Scale("float16", (1, 128)))), 256) == ["outer"]
