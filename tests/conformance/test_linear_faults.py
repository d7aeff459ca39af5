"""Faults planted in linear kernels: each is caught, by the check that should."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import linear

from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import DeviceInfo, EagerGraphEngine, LinearCall, LinearKernel, LinearWorkload, Reason
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject

Tensor = torch.Tensor
Weights = dict[str, Tensor]


class ScaleIgnored(EmulatedLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(
            replace(call, weights={**call.weights, "weight_scale": torch.ones_like(call.weights["weight_scale"])})
        )


class ScaleInverted(EmulatedLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, weights={**call.weights, "weight_scale": 1 / call.weights["weight_scale"]}))


class ScalesShifted(EmulatedLinear):
    """Each row takes its neighbour's scale."""

    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(
            replace(call, weights={**call.weights, "weight_scale": call.weights["weight_scale"].roll(1, 0)})
        )


class Transposed(LinearKernel):
    """Packs the weight and forgets how to read it back."""

    layout = "transposed"

    def prepack(self, weights: Weights) -> Weights:
        return {"weight": weights["weight"].T.contiguous()}

    def unpack(self, weights: Weights) -> Tensor:
        return weights["weight"]

    def rows(self, weights: Weights, ids: Tensor) -> Tensor:
        return weights["weight"][:, ids].T

    def apply(self, call: LinearCall) -> Tensor:
        return linear(call.x, call.weights["weight"].T, call.bias)


class BiasTwice(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        return y if call.bias is None else y + call.bias


class AddsIntoTheBias(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        bias = call.bias
        y = super().apply(call)
        if bias is not None:
            bias += 1
        return y


class BegunEarly(PlainLinear):
    """The kernel begins before its inputs are written: results are written when the next call has begun."""

    overlapped = True
    waits = False
    unfinished: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def apply(self, call: LinearCall) -> Tensor:
        if self.waits:
            self.finish()
        y = super().apply(call)
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


def test_chains_of_packed_elements_have_whole_bytes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight whose outputs are odd has no partner of the same format: a row would end in the middle of a byte."""
    monkeypatch.setattr(EmulatedLinear, "overlapped", True)
    claims = [{"dtype": ["float32"]}, {"spec": ["int4@float32:row/*"]}]
    trials = LinearTrials().trials(subject(site, EmulatedLinear, "linear", name="emulated", requires=claims), Plan())
    findings = [check.run() for trial in trials for check in trial.checks if check.name == "chain"]
    assert {finding.outcome for finding in findings} == {"passed", "unsupported"}


def tried(site: Site, kernel: type[LinearKernel], specs: list[str], every: int = 1) -> Caught | None:
    claims = [{"dtype": ["float32"]}, {"spec": specs}]
    return first_failure(subject(site, kernel, "linear", name="torch", requires=claims), LinearTrials(), every=every)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    kernel, specs, check = PLANTED[title]
    caught = tried(site, kernel, specs)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@HEALTHY
@pytest.mark.parametrize(("kernel", "specs"), [(PlainLinear, PLAIN), (EmulatedLinear, QUANTIZED)])
def test_a_healthy_kernel_passes(site: Site, kernel: type[LinearKernel], specs: list[str], every: int) -> None:
    caught = tried(site, kernel, specs, every)
    assert caught is None, str(caught)


class OneSize(PlainLinear):
    """Serves one weight, and says so."""

    error = 0.0

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        fits = (workload.out_features, workload.in_features) == (48, 32)
        return [] if fits else [Reason("size", "it has one")]

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> list[tuple[int, int, int]]:
        return [(5, 48, 32)]

    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(call) + self.error


class OneSizeWrong(OneSize):
    error = 0.1


def test_a_kernel_is_tried_with_the_sizes_it_has(site: Site) -> None:
    trials = list(
        LinearTrials().trials(subject(site, OneSize, "linear", name="torch", requires=[{"spec": PLAIN}]), Plan())
    )
    assert any("5x48x32" in trial.case and trial.checks for trial in trials)
    assert tried(site, OneSize, PLAIN) is None
    caught = tried(site, OneSizeWrong, PLAIN)
    assert caught
    assert caught.check == "values"


@pytest.mark.parametrize(
    ("claim", "numbers"),
    [
        ({}, "none one few many"),
        ({"max": 1}, "none one"),
        ({"max": 64}, "none one few 64"),
        ({"min": 9, "max": 32}, "9 32"),
        ({"min": 513}, "513"),
    ],
    ids=str,
)
def test_steps_are_those_of_the_claimed_range(site: Site, claim: dict[str, int], numbers: str) -> None:
    requires = [{"spec": PLAIN}, {"tokens": claim}] if claim else [{"spec": PLAIN}]
    trials = LinearTrials().trials(subject(site, PlainLinear, "linear", name="torch", requires=requires), Plan())
    assert {trial.case.split("/")[3] for trial in trials if trial.checks} == set(numbers.split())
