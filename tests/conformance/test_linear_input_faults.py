"""Faults of linear and experts kernels that only certain steps, weights and second instances show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.conformance.families.experts import ExpertsTrials
from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint.reference.experts import ReferenceExperts
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import ExpertsCall, LinearCall, LinearKernel
from tests.conformance.trying import first_failure, subject

Tensor = torch.Tensor


class StepsOf8To14(PlainLinear):
    low, high = 8, 14

    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        if self.low <= len(y) <= self.high:
            y[-1] = 0
        return y


class StepsOf66To126(StepsOf8To14):
    low, high = 66, 126


class StepsPast192(StepsOf8To14):
    low, high = 192, 10**6


class OverflowClamped(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(call).clamp(-65504, 65504)


class SmallRowsAreZero(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, x=call.x * (call.x.abs().amax(-1, keepdim=True) > 1e-3)))


class KeptByShape(PlainLinear):
    kept: ClassVar[dict[Any, Tensor]] = {}

    def apply(self, call: LinearCall) -> Tensor:
        w = self.kept.setdefault((call.weights["weight"].shape, call.x.dtype), call.weights["weight"].clone())
        return super().apply(replace(call, weights={"weight": w}))


class KeptByAddress(PlainLinear):
    kept: tuple[int, Tensor] | None = None

    def apply(self, call: LinearCall) -> Tensor:
        weight = call.weights["weight"]
        if self.kept is None or self.kept[0] != weight.data_ptr():
            self.kept = (weight.data_ptr(), weight.clone())
        return super().apply(replace(call, weights={"weight": self.kept[1]}))


class LowestCodeClamped(EmulatedLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, weights={**call.weights, "weight": call.weights["weight"].clamp(min=-127)}))


class ScalesOfOneSign(EmulatedLinear):
    def apply(self, call: LinearCall) -> Tensor:
        weights = {**call.weights, "weight_scale": call.weights["weight_scale"].abs()}
        return super().apply(replace(call, weights=weights))


class ScalesInFloat16(EmulatedLinear):
    def apply(self, call: LinearCall) -> Tensor:
        weights = {**call.weights, "weight_scale": call.weights["weight_scale"].half().float()}
        return super().apply(replace(call, weights=weights))


INT8 = ["int8@float32:row/*float??"]
LINEAR: dict[type[LinearKernel], tuple[str, str, list[str]]] = {
    StepsOf8To14: ("sizes", "float32", ["float32/float32"]),
    StepsOf66To126: ("sizes", "float32", ["float32/float32"]),
    StepsPast192: ("sizes", "float32", ["float32/float32"]),
    OverflowClamped: ("extremes", "float16", ["float16/float16"]),
    SmallRowsAreZero: ("extremes", "float16", ["float16/float16"]),
    KeptByShape: ("instances", "float32", ["float32/float32"]),
    KeptByAddress: ("instances", "float32", ["float32/float32"]),
    LowestCodeClamped: ("", "float32", INT8),
    ScalesOfOneSign: ("values", "float16", INT8),
    ScalesInFloat16: ("", "float16", INT8),
}


@pytest.mark.parametrize("kernel", LINEAR)
def test_a_fault_in_a_linear_kernel_is_caught(site: Site, kernel: type[LinearKernel]) -> None:
    check, dtype, specs = LINEAR[kernel]
    claims = [{"dtype": [dtype]}, {"spec": specs}]
    caught = first_failure(subject(site, kernel, "linear", name="torch", requires=claims), LinearTrials(), plan=Plan())
    assert caught, f"{kernel.__name__} was not caught"
    assert check in ("", caught.check), str(caught)


class ExpertsKeptByAddress(ReferenceExperts):
    kept: tuple[int, dict[str, Tensor]] | None = None

    def apply(self, call: ExpertsCall) -> None:
        address = call.w["w13.weight"].data_ptr()
        if self.kept is None or self.kept[0] != address:
            self.kept = (address, {name: x.clone() for name, x in call.w.items()})
        super().apply(replace(call, w=self.kept[1]))


def test_experts_that_keep_old_weights_are_caught(site: Site) -> None:
    claims = [{"dtype": ["float32"]}, {"spec": ["float32/float32"]}, {"activation": ["silu_and_mul"]}]
    tried = subject(site, ExpertsKeptByAddress, "experts", requires=claims)
    caught = first_failure(tried, ExpertsTrials(), plan=Plan())
    assert caught
    assert caught.check == "instances", str(caught)
