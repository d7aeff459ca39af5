"""Faults planted in linear kernels: each is caught, by the check that should."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.site import Site
from hardpoint.quantization.emulated_linear import EmulatedLinear
from hardpoint.quantization.plain_linear import PlainLinear
from hardpoint_plugin_api import LinearKernel
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor
Weights = dict[str, Tensor]


class ScaleIgnored(EmulatedLinear):
    def apply(self, x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        return super().apply(x, {**weights, "weight_scale": torch.ones_like(weights["weight_scale"])}, bias)


class ScaleInverted(EmulatedLinear):
    def apply(self, x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        return super().apply(x, {**weights, "weight_scale": 1 / weights["weight_scale"]}, bias)


class ScalesShifted(EmulatedLinear):
    """Each row takes its neighbour's scale."""

    def apply(self, x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        return super().apply(x, {**weights, "weight_scale": weights["weight_scale"].roll(1, 0)}, bias)


class Transposed(LinearKernel):
    """Packs the weight and forgets how to read it back."""

    layout = "transposed"

    def prepack(self, weights: Weights) -> Weights:
        return {"weight": weights["weight"].T.contiguous()}

    def unpack(self, weights: Weights) -> Tensor:
        return weights["weight"]

    def rows(self, weights: Weights, ids: Tensor) -> Tensor:
        return weights["weight"][:, ids].T

    def apply(self, x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        return linear(x, weights["weight"].T, bias)


class BiasTwice(PlainLinear):
    def apply(self, x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        y = super().apply(x, weights, bias)
        return y if bias is None else y + bias


class AddsIntoTheBias(PlainLinear):
    def apply(self, x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        y = super().apply(x, weights, bias)
        if bias is not None:
            bias += 1
        return y


QUANTIZED, PLAIN = ["*@*:*+*/*"], ["float32/float32"]
PLANTED: dict[str, tuple[type[LinearKernel], list[str], str]] = {
    "scale ignored": (ScaleIgnored, QUANTIZED, "values"),
    "scale inverted": (ScaleInverted, QUANTIZED, "values"),
    "scales shifted": (ScalesShifted, QUANTIZED, "values"),
    "not unpacked": (Transposed, PLAIN, "unpack"),
    "bias twice": (BiasTwice, PLAIN, "values"),
    "bias written": (AddsIntoTheBias, PLAIN, "values"),
}


def tried(site: Site, kernel: type[LinearKernel], specs: list[str]) -> Caught | None:
    claims = [{"dtype": ["float32"]}, {"spec": specs}]
    return first_failure(subject(site, kernel, "linear", name="torch", requires=claims), LinearTrials())


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    kernel, specs, check = PLANTED[title]
    caught = tried(site, kernel, specs)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@pytest.mark.parametrize(("kernel", "specs"), [(PlainLinear, PLAIN), (EmulatedLinear, QUANTIZED)])
def test_a_healthy_kernel_passes(site: Site, kernel: type[LinearKernel], specs: list[str]) -> None:
    caught = tried(site, kernel, specs)
    assert caught is None, str(caught)
