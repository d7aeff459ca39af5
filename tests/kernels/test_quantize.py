"""Rounding of activations in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint import numerics
from hardpoint.kernels.quantize import quantize_rows
from hardpoint_plugin_api import QuantSpec, Scale
from tests.kernels.judged import failures, variants


@pytest.mark.parametrize(("name", "dtype", "device"), variants("quantize_rows"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, quantize_rows, dtype, device)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("element", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("columns", [-1, 32, 128])
@pytest.mark.parametrize("magnitude", [1.0, 1e-37, 1e-42, 1e37])
def test_numbers_of_any_magnitude(element: str, columns: int, magnitude: float) -> None:
    spec = QuantSpec(element, scales=(Scale("float32", (1, columns)),), static=False)
    x = torch.randn(3, 200) * magnitude
    codes, scale = quantize_rows(x, spec=spec)
    wanted = numerics.quantize_rows(x, spec, {})
    torch.testing.assert_close(scale, wanted.scale.reshape(scale.shape), rtol=1e-6, atol=2e-45)
    apart = (codes.float() - wanted.codes.float()).abs()  # one step where the quotient lies between two elements
    step = 1 if element == "int8" else wanted.codes.float().abs() / 4 + 2.0**-9
    assert (apart <= step).all()
    assert (apart != 0).float().mean() < (0.01 if magnitude > 1e-40 else 1)


@pytest.mark.parametrize("element", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_rounds_as_division_does(element: str) -> None:
    """Quotients of narrow numbers often lie in the middle between two elements, where the last bit decides."""
    spec = QuantSpec(element, scales=(Scale("float32", (1, -1)),), static=False)
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x[:, 0] = torch.arange(64).float() / 16 + 4
    codes, scale = quantize_rows(x, spec=spec)
    wanted = numerics.quantize_rows(x, spec, {})
    assert torch.equal(scale, wanted.scale.reshape(scale.shape))
    assert torch.equal(codes.float(), wanted.codes.float())
    by_inverse = (x * (1 / scale)).to(codes.dtype) if codes.dtype != torch.int8 else (x * (1 / scale)).round()
    assert not torch.equal(by_inverse.float(), wanted.codes.float())


def test_the_nearest_element_ties_to_even() -> None:
    spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.49]])
    codes, scale = quantize_rows(x, spec=spec)
    assert scale.item() == 1.0
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -126, 0]]


def test_a_block_that_is_not_finite_stands_for_nan() -> None:
    spec = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 32)),), static=False)
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40], x[2, 5] = float("nan"), float("inf"), -float("inf")
    codes, scale = quantize_rows(x, spec=spec)
    assert scale.isnan().tolist() == [[True, False], [False, True], [True, False]]
    assert torch.equal(codes.float()[0, 32:] * scale[0, 1], torch.ones(32))
