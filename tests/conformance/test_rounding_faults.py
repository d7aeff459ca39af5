"""Faults planted where activations travel quantized: in kernels that take them, and in ops that write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.site import Site
from hardpoint.ops.judge import judge
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint.ops.rms_norm import rms_norm, rms_norm_quantized
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint_plugin_api import LinearCall, QuantSpec, Scale
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject
from tests.ops.judging import cases

INT8_ROWS = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)


class TakesInt8(EmulatedLinear):
    """Wants its input rounded, and multiplies the numbers that it stands for."""

    input_spec = INT8_ROWS

    def apply(self, call: LinearCall) -> torch.Tensor:
        if call.scales is not None:
            call = replace(call, x=(call.x * call.scales).to(self.ctx.dtype), scales=None)
        return super().apply(call)


class IgnoresTheScale(TakesInt8):
    def apply(self, call: LinearCall) -> torch.Tensor:
        scales = None if call.scales is None else torch.ones_like(call.scales)
        return super().apply(replace(call, scales=scales))


class TwoRowsShareAScale(TakesInt8):
    def apply(self, call: LinearCall) -> torch.Tensor:
        scales = call.scales
        if scales is not None and len(scales) == 2:
            scales = scales[:1].expand(2, 1)
        return super().apply(replace(call, scales=scales))


class WantsAStaticScale(TakesInt8):
    input_spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),))


def tried(site: Site, kernel: type[EmulatedLinear], every: int = 1) -> Caught | None:
    claims = [{"dtype": ["float32"]}, {"spec": [f"int8@*:row/{INT8_ROWS}"]}]
    return first_failure(subject(site, kernel, "linear", name="torch", requires=claims), LinearTrials(), every=every)


@pytest.mark.parametrize(
    ("kernel", "code"), [(IgnoresTheScale, ""), (TwoRowsShareAScale, ""), (WantsAStaticScale, "input-spec")]
)
def test_the_kit_tries_the_input_that_a_kernel_wants(site: Site, kernel: type[EmulatedLinear], code: str) -> None:
    caught = tried(site, kernel)
    assert caught is not None
    assert caught.check == "quantized-input"
    assert not code or code in caught.codes


@HEALTHY
def test_a_kernel_that_takes_its_input_rounded_passes(site: Site, every: int) -> None:
    caught = tried(site, TakesInt8, every)
    assert caught is None, str(caught)


Rounded = tuple[torch.Tensor, torch.Tensor]


def cut_off(x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec) -> Rounded:
    y = rms_norm.reference(x, weight, eps=eps).float()
    _, scale = quantize_rows.reference(y, spec=spec)
    return (y / scale).nan_to_num().floor().clamp(-128, 127).to(torch.int8), scale


def scale_of_the_neighbour(x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec) -> Rounded:
    codes, scale = rms_norm_quantized.reference(x, weight, eps=eps, spec=spec)
    return codes, scale.roll(1, 0)


def other_range(x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec) -> Rounded:
    """Elements for 127, a scale for 128."""
    codes, scale = rms_norm_quantized.reference(x, weight, eps=eps, spec=spec)
    return codes, scale * (127 / 128)


def unsigned(x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec) -> Rounded:
    codes, scale = rms_norm_quantized.reference(x, weight, eps=eps, spec=spec)
    return codes.view(torch.uint8), scale


@pytest.mark.parametrize("fault", [cut_off, scale_of_the_neighbour, other_range, unsigned])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_faults_of_rounding_are_beyond_the_error_model(fault: Callable[..., Rounded], dtype: torch.dtype) -> None:
    to_int8 = [case for case in cases(rms_norm_quantized, dtype) if case.kwargs["spec"] == INT8_ROWS]
    assert not all(judge(rms_norm_quantized, fault, case, dtype=dtype).passed for case in to_int8)


def wrong_in_blocks_of_64(x: torch.Tensor, *, spec: QuantSpec) -> Rounded:
    """Right for rows and for blocks of 32; blocks of 64 columns get the scale of the block before."""
    codes, scale = quantize_rows.reference(x, spec=spec)
    return codes, scale.roll(1, 1) if spec.scales[0].block == (1, 64) else scale


def test_each_claimed_spec_of_an_op_is_tried(site: Site) -> None:
    blocks = [f"int8@float32:1x{columns}+dynamic" for columns in (32, 64)]
    for claimed, is_caught in ((blocks, True), (blocks[:1], False)):
        requires = [{"dtype": ["float32"]}, {"spec": claimed}]
        caught = first_failure(
            subject(site, wrong_in_blocks_of_64, "op", "quantize_rows", requires=requires), OpTrials()
        )
        assert (caught is not None) is is_caught, str(caught)
        if caught:
            assert (caught.check, "1x64" in caught.case) == ("values", True)
