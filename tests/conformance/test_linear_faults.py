"""Faults planted in linear kernels: each is caught, by the check that should."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch.nn.functional import linear

from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.quantization.emulated_linear import EmulatedLinear
from hardpoint.quantization.plain_linear import PlainLinear
from hardpoint_plugin_api import EagerGraphEngine, LinearKernel
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


class BegunEarly(PlainLinear):
    """What it is given has not been written when it begins: results are written when the next call has begun."""

    overlapped = True
    waits = False
    unfinished: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def apply(self, x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        if self.waits:
            self.finish()
        y = super().apply(x, weights, bias)
        self.finish()
        out = torch.full_like(y, torch.nan)
        self.unfinished.append((out, y))
        return out

    @classmethod
    def finish(cls) -> None:
        while cls.unfinished:
            out, y = cls.unfinished.pop()
            out.copy_(y)


class BegunEarlyAndWaiting(BegunEarly):
    waits = True


QUANTIZED, PLAIN = ["*@*:*+*/*"], ["float32/float32"]
PLANTED: dict[str, tuple[type[LinearKernel], list[str], str]] = {
    "scale ignored": (ScaleIgnored, QUANTIZED, "values"),
    "scale inverted": (ScaleInverted, QUANTIZED, "values"),
    "scales shifted": (ScalesShifted, QUANTIZED, "values"),
    "not unpacked": (Transposed, PLAIN, "unpack"),
    "bias twice": (BiasTwice, PLAIN, "values"),
    "bias written": (AddsIntoTheBias, PLAIN, "values"),
}


@pytest.mark.parametrize("kernel", [BegunEarly, BegunEarlyAndWaiting])
def test_input_that_is_not_there_yet(site: Site, kernel: type[BegunEarly], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.platform, "synchronize", kernel.finish)
    monkeypatch.setattr(site.platform, "graph_engine", EagerGraphEngine)  # what is not written yet cannot be recorded
    trials = LinearTrials().trials(subject(site, kernel, "linear", name="torch", requires=[{"spec": PLAIN}]), Plan())
    findings = [check.run() for trial in trials for check in trial.checks if check.name == "chain"]
    found = {fault.code for finding in findings for fault in finding.faults}
    assert findings
    assert found == (set() if kernel.waits else {"too-early"})


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
