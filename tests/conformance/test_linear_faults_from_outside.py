"""Faults in linear kernels that level quick once let pass, planted by plugins' authors: each is caught by its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.site import Site
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import DeviceInfo, LinearCall, LinearKernel
from tests.conformance.trying import QUICK, first_failure, subject

Tensor = torch.Tensor
Weights = dict[str, Tensor]
PLAIN = ["float32/float32", "float16/float16", "bfloat16/bfloat16"]


# Linear kernels. Sums that are kept in bfloat16, of activations in bfloat16.


class Accumulates(PlainLinear):
    """Adds tiles of ``tile`` columns, each of them summed in float32, to a sum in bfloat16."""

    tile = 64

    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        y = x.new_zeros(*x.shape[:-1], weights["weight"].shape[0])
        for a, w in zip(x.split(self.tile, -1), weights["weight"].split(self.tile, -1), strict=True):
            y += linear(a.float(), w.float()).to(y.dtype)
        return y if bias is None else y + bias


class AccumulatesTilesOf32(Accumulates):
    tile = 32


class AccumulatesTilesOf128(Accumulates):
    tile = 128


class AccumulatesTilesOf256(Accumulates):
    tile = 256


class AddsHalves(PlainLinear):
    """Adds what 16 parts of the columns come to as a tree, in bfloat16."""

    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        columns = range(0, x.shape[-1], 16)
        parts = [linear(x[..., c : c + 16].float(), weights["weight"][:, c : c + 16].float()) for c in columns]
        sums = [part.to(x.dtype) for part in parts]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + sums[len(sums) & ~1 :]
        return sums[0] if bias is None else sums[0] + bias


class AccumulatesDequantized(EmulatedLinear):
    """The same for quantized weights, group by group."""

    def apply(self, call: LinearCall) -> Tensor:
        plain = self.unpack(call.weights)
        return Accumulates(self.ctx, self.workload).apply(LinearCall(call.x, {"weight": plain}, call.bias))


# Linear kernels. Edges of tiles, ranges and instances.


def edited(edit: Callable[[Tensor, Tensor, Weights], Tensor], base: type[LinearKernel] = PlainLinear) -> Any:
    """A kernel whose result y goes through ``edit(y, x, weights)``."""

    class Edited(base):  # type: ignore[misc, valid-type]  # a class made in a function
        def apply(self, call: LinearCall) -> Tensor:
            return edit(super().apply(call), call.x, call.weights)

    return Edited


def last_row_missing(tile: int) -> Any:
    def edit(y: Tensor, x: Tensor, weights: Weights) -> Tensor:
        if y.shape[0] > tile and y.shape[0] % tile == 1:
            y[-1] = 0
        return y

    return edited(edit)


def column_missing(column: int) -> Any:
    def edit(y: Tensor, x: Tensor, weights: Weights) -> Tensor:
        if y.shape[1] > column:
            y[:, column] = 0
        return y

    return edited(edit)


class ForgetsLongRows(PlainLinear):
    """Reads no more than ``most`` columns."""

    most = 1024

    def apply(self, call: LinearCall) -> Tensor:
        return linear(call.x[..., : self.most], call.weights["weight"][:, : self.most], call.bias)


class ForgetsColumn4096(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        keep = torch.ones(x.shape[-1], dtype=x.dtype)
        keep[4096:4097] = 0
        return linear(x * keep, weights["weight"], bias)


class ScratchOfTheFirstCall(PlainLinear):
    """Its workspace has as many rows as its first step; more rows than that are lost."""

    rows_of_first = 0

    def apply(self, call: LinearCall) -> Tensor:
        x = call.x
        self.rows_of_first = self.rows_of_first or x.shape[0]
        y = super().apply(call)
        y[self.rows_of_first :] = 0
        return y


class OwnSizesAlone(PlainLinear):
    """Names a size at which it is right; it serves others, and is wrong there."""

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> list[tuple[int, int, int]]:
        return [(5, 48, 32)]

    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        return y if y.shape[1] == 48 else y * 1.1


class NanSpreads(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(call) + 0 * call.x.sum()


class NanIsZero(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, x=call.x.nan_to_num(0.0)))


class ThroughFloat16(PlainLinear):
    """Multiplies bfloat16 as float16, which ends at 65504."""

    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, x=call.x.half().float().to(call.x.dtype)))


class SmallIsZero(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, x=torch.where(call.x.abs() < 1e-6, 0, call.x)))


class GroupsOf64InFloat16(EmulatedLinear):
    """Wrong for uint4 in groups of 64 with 16-bit scales alone."""

    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        assert self.workload.spec is not None
        spec = self.workload.spec[0]
        wrong = spec.scales[0].block == (1, 64) and spec.scales[0].format != "float32"
        return y * 1.1 if wrong else y


class LastScaleIgnored(EmulatedLinear):
    """The last group of a row takes the scale of the one before."""

    def apply(self, call: LinearCall) -> Tensor:
        weights = call.weights
        scale = weights["weight_scale"].clone()
        scale[:, -1:] = scale[:, -2:-1] if scale.shape[1] > 1 else scale
        return super().apply(replace(call, weights={**weights, "weight_scale": scale}))


class GroupsBeginOneLate(EmulatedLinear):
    """The first column of a group takes the scale of the group before."""

    def unpacked(self, weights: Weights) -> Tensor:
        assert self.workload.spec is not None
        size = self.workload.spec[0].scales[0].block[1]
        plain = self.unpack(weights)
        scale = weights["weight_scale"].to(plain.dtype)
        for group in range(1, scale.shape[1]):
            plain[:, group * size] *= scale[:, group - 1] / scale[:, group]
        return plain

    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        return linear(x, self.unpacked(weights).to(x.dtype), bias)


class ZeroPointsSigned(EmulatedLinear):
    """Takes zero points above 7 for negative ones."""

    def apply(self, call: LinearCall) -> Tensor:
        point = call.weights["weight_zero_point"].to(torch.int16)
        return super().apply(
            replace(call, weights={**call.weights, "weight_zero_point": torch.where(point > 7, point - 16, point)})
        )


class InputScaleIgnored(EmulatedLinear):
    """Rounds activations by a scale of their own, where the checkpoint has one."""

    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(
            replace(call, weights={**call.weights, "input_scale": call.x.float().abs().amax().view(1) / 127})
        )


class OuterScaleIgnored(EmulatedLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(
            replace(call, weights={**call.weights, "weight_scale_2": torch.ones_like(call.weights["weight_scale_2"])})
        )


class ColumnGroupsIgnored(EmulatedLinear):
    """Counts off the groups that a checkpoint with reordered columns looks up."""

    def apply(self, call: LinearCall) -> Tensor:
        index = call.weights["weight_group_index"].sort().values
        return super().apply(replace(call, weights={**call.weights, "weight_group_index": index}))


class OnlyLargeStepsAreWrong(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        return y * 1.1 if call.x.shape[0] > 4096 else y


LINEAR: dict[str, tuple[Any, list[Any], str]] = {
    **{
        f"bfloat16 sums, {kernel.__name__}": (kernel, [{"spec": ["bfloat16/bfloat16"]}], "accumulation")
        for kernel in (Accumulates, AccumulatesTilesOf32, AccumulatesTilesOf128, AccumulatesTilesOf256, AddsHalves)
    },
    "bfloat16 sums of int4": (AccumulatesDequantized, [{"spec": ["int4@float32:1x32/bfloat16"]}], "accumulation"),
    **{f"last row, T % {tile} = 1": (last_row_missing(tile), [{"spec": PLAIN}], "") for tile in (16, 32, 64, 128)},
    **{f"column {column}": (column_missing(column), [{"spec": PLAIN}], "") for column in (256, 512, 640)},
    "columns past 1,024": (ForgetsLongRows, [{"spec": PLAIN}], ""),
    "column 4,096": (ForgetsColumn4096, [{"spec": PLAIN}], ""),
    "scratch of the first call": (ScratchOfTheFirstCall, [{"spec": PLAIN}], ""),
    "sizes that trial_sizes hides": (OwnSizesAlone, [{"spec": PLAIN}], ""),
    "NaN spreads": (NanSpreads, [{"spec": PLAIN}], ""),
    "NaN is zero": (NanIsZero, [{"spec": PLAIN}], ""),
    "large rows": (ThroughFloat16, [{"spec": ["bfloat16/bfloat16"]}], ""),
    "small rows": (SmallIsZero, [{"spec": PLAIN}], ""),
    "groups of 64": (GroupsOf64InFloat16, [{"spec": ["uint4@*:1x*+asym/*float??"]}], ""),
    "last scale": (LastScaleIgnored, [{"spec": ["int8@*:1x*/*float??"]}], ""),
    "edge of a group": (GroupsBeginOneLate, [{"spec": ["int8@float32:1x*/*float??"]}], ""),
    "signs of zero points": (ZeroPointsSigned, [{"spec": ["uint4@*:1x*+asym/*float??"]}], ""),
    "scale of activations": (InputScaleIgnored, [{"spec": ["int8@*:row/int8@float32:all"]}], ""),
    "outer scale": (OuterScaleIgnored, [{"spec": ["float4_e2m1@float8_e4m3fn:1x16@float32:all/*float??"]}], ""),
    "column groups": (ColumnGroupsIgnored, [{"spec": ["int4@*:1x32+permuted/*float??"]}], ""),
    "steps past 4,096": (OnlyLargeStepsAreWrong, [{"spec": PLAIN}, {"tokens": {"min": 8192}}], ""),
}


@pytest.mark.parametrize("title", LINEAR)
def test_a_fault_in_a_linear_kernel_is_caught(site: Site, title: str) -> None:
    kernel, requires, code = LINEAR[title]
    tried = subject(site, kernel, "linear", name="torch", requires=[{"dtype": ["bfloat16"]}, *requires])
    caught = first_failure(tried, LinearTrials(), plan=QUICK)
    assert caught, f"{title} was not caught"
    assert not code or code in caught.codes, str(caught)
