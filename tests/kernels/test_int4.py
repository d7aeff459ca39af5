"""The product with 4-bit weights, in the interpreter: ways to cut it, on whole numbers, where all sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton

from hardpoint.conformance.site import Site
from hardpoint.kernels import launch, weight_only
from hardpoint.kernels.int4_tuning import Int4Configuration, int4_configuration
from hardpoint.kernels.weight_only import TritonInt4Linear, int4_dequantize, int4_matmul
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import LinearWorkload, QuantSpec, Scale, dequantize

_CUTS = {
    "rows": Int4Configuration(4, 32, 2, 1),
    "split": Int4Configuration(4, 32, 4, 1, split=True),
    "pieces": Int4Configuration(16, 64, 4, 1, pieces=2),
    "split pieces": Int4Configuration(8, 32, 2, 1, split=True, pieces=4),
}


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


class _Case:
    """A weight of whole numbers, packed; its scales are powers of two."""

    def __init__(self, site: Site, dtype: str, n: int, k: int, group: int, element: str, zero_point: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.dtype = getattr(torch, dtype)
        spec = QuantSpec(element, scales=(Scale("bfloat16", (1, group)),), zero_point=zero_point)
        groups = (n, 1 if group == -1 else k // group)
        self.slots = {
            "weight": torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
            "weight_scale": 2.0 ** torch.randint(-2, 2, groups, generator=generator).bfloat16(),
        }
        if zero_point:
            points = torch.randint(0, 16, groups, generator=generator)
            self.slots["weight_zero_point"] = (points - 8).to(torch.int8) if element == "int4" else points.byte()
        if element == "float4_e2m1":
            spec = self._with_byte_scales(spec, groups, generator)
        self.plain = dequantize(self.slots, spec, torch.float64)
        workload = LinearWorkload(dtype=dtype, in_features=k, out_features=n, spec=(spec, QuantSpec(dtype)))
        self.kernel = TritonInt4Linear(site.context(dtype), workload)
        self.packed = self.kernel.prepack(self.slots)

    def _with_byte_scales(self, spec: QuantSpec, groups: tuple[int, int], generator: torch.Generator) -> QuantSpec:
        """Scales of e8m0 for 32 columns; of e4m3 for 16, and of float32 for rows. Halves of whole numbers."""
        powers = torch.randint(0, 3, groups, generator=generator)
        if spec.scales[0].block[1] == 32:
            self.slots["weight_scale"] = (powers + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
            return replace(spec, scales=(Scale("float8_e8m0fnu", (1, 32)),))
        self.slots["weight_scale"] = (powers + 1).float().to(torch.float8_e4m3fn)
        self.slots["weight_scale_2"] = 2.0 ** torch.randint(-1, 2, (groups[0], 1), generator=generator).float()
        return replace(spec, scales=(Scale("float8_e4m3fn", (1, 16)), Scale("float32", (1, -1))))

    def check(self, x: torch.Tensor, bias: torch.Tensor | None, cut: Int4Configuration | None) -> None:
        e2m1 = self.kernel.tiles.is_e2m1
        got = int4_matmul(x, self.packed, bias, self.kernel.tiles.group, self.kernel.tiles.flip, cut, e2m1=e2m1)
        wanted = x.double() @ self.plain.T + (0 if bias is None else bias.double())
        torch.testing.assert_close(got, wanted.to(self.dtype), rtol=0, atol=0, equal_nan=True)


_WEIGHTS = pytest.mark.parametrize(
    ("n", "k", "group", "element", "zero_point", "dtype"),
    [
        (40, 1024, 128, "int4", False, "bfloat16"),
        (33, 608, 32, "uint4", True, "bfloat16"),
        (16, 192, 64, "int4", True, "float16"),
        (5, 1536, 512, "uint4", True, "float16"),
        (17, 280, -1, "int4", True, "bfloat16"),
        (33, 288, 32, "uint4", True, "float32"),
    ],
)
_FLOATS = [
    pytest.param(n, k, group, "float4_e2m1", False, dtype, cut, id=f"{group}-{dtype}-{name}")
    for n, k, group, dtype in ((40, 1024, 32, "float16"), (33, 224, 16, "float16"), (17, 288, 32, "float32"))
    for name, cut in _CUTS.items()
]


def _whole(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("cut", _CUTS.values(), ids=_CUTS.keys())
@_WEIGHTS
def test_cuts(
    site: Site, cut: Int4Configuration, n: int, k: int, group: int, element: str, zero_point: bool, dtype: str
) -> None:
    case = _Case(site, dtype, n, k, group, element, zero_point)
    x = _whole(5, 2 * k, dtype=case.dtype)
    assert torch.equal(case.kernel.unpack(case.packed).double(), case.plain)
    case.check(x[:, :k], _whole(n, dtype=case.dtype), cut)
    if cut.pieces == 1:
        case.check(x[:3, ::2], None, cut)


@pytest.mark.parametrize(("n", "k", "group", "element", "zero_point", "dtype", "cut"), _FLOATS)
def test_four_bit_floats(
    site: Site, n: int, k: int, group: int, element: str, zero_point: bool, dtype: str, cut: Int4Configuration
) -> None:
    case = _Case(site, dtype, n, k, group, element, zero_point)
    assert torch.equal(case.kernel.unpack(case.packed).double(), case.plain)
    ids = torch.tensor([n - 1, 0, 3])
    assert torch.equal(case.kernel.rows(case.packed, ids).double(), case.plain[ids])
    case.check(_whole(5, k, dtype=case.dtype), _whole(n, dtype=case.dtype), cut)


@_WEIGHTS
def test_numbers(site: Site, n: int, k: int, group: int, element: str, zero_point: bool, dtype: str) -> None:
    case = _Case(site, dtype, n, k, group, element, zero_point)
    got = int4_dequantize(case.packed, k, case.dtype, case.kernel.tiles.group, case.kernel.tiles.flip)
    assert torch.equal(got.double(), case.plain)


def test_fewer_stages_where_shared_memory_is_small(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kernel, asked = _Case(site, "bfloat16", 40, 1024, 128, "uint4", True), weight_only._int4_matmul, list[int]()

    class SmallDevice:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def launch(*args: object, num_stages: int, **named: object) -> object:
                asked.append(num_stages)
                if num_stages > 2:
                    raise triton.OutOfResources(100 << 10, 99 << 10, "shared memory")
                return kernel[grid](*args, num_stages=num_stages, **named)

            return launch

    monkeypatch.setattr(weight_only, "_int4_matmul", SmallDevice())
    monkeypatch.setattr(launch, "_fitting", {})
    cut = replace(_CUTS["rows"], num_stages=4)
    for _ in range(2):
        case.check(_whole(5, 1024, dtype=case.dtype), None, cut)
    assert asked == [4, 3, 2, 2]


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("rows", [4, 12])
def test_numbers_that_are_not_finite_stay_in_their_rows(site: Site, rows: int, zero_point: bool) -> None:
    case = _Case(site, "bfloat16", 32, 256, 128, "uint4", zero_point)
    x = _whole(rows, 256, dtype=torch.bfloat16)
    x[1, 7], x[2, 200], x[3, 0], x[3, 255] = torch.inf, torch.nan, torch.inf, -torch.inf
    infinite = x.isinf().any(1)
    case.check(x[~infinite], None, int4_configuration(rows, 32, 2))
    got = int4_matmul(x, case.packed, None, case.kernel.tiles.group, case.kernel.tiles.flip)
    assert torch.equal(got.isfinite(), x.isfinite().all(1, keepdim=True).expand_as(got))
    case.check(x, None, None)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_configurations_are_sound(itemsize: int) -> None:
    for num_rows, n in product((1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 300, 5000), (1, 1024, 4096, 28672)):
        cut = int4_configuration(num_rows, n, itemsize)
        assert cut.block_m >= min(num_rows, 8)
        assert cut.block_n >= 16 * (1 if cut.split or itemsize == 4 else cut.num_warps)
        assert cut.pieces == 1 or -(-num_rows // cut.block_m) * -(-n // cut.block_n) * cut.pieces <= 1024
