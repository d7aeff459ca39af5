"""Faults in experts and ops that level quick let pass, planted by plugins' authors: each is caught by its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from hardpoint.conformance.families.experts import ExpertsTrials
from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.site import Site
from hardpoint.ops.rotary_embedding import rotary_embedding
from hardpoint.reference.experts import ReferenceExperts
from hardpoint_plugin_api import ExpertsCall, QuantSpec
from tests.conformance.trying import QUICK, first_failure, subject

Tensor = torch.Tensor
Weights = dict[str, Tensor]


class FirstProductIn16Bits(ReferenceExperts):
    """Sums of both products in bfloat16, tile by tile."""

    def multiply(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        y = x.new_zeros(x.shape[0], weight.shape[0])
        for a, w in zip(x.split(64, -1), weight.split(64, -1), strict=True):
            y += linear(a.float(), w.float()).to(x.dtype)
        return y


class SecondProductIn16Bits(FirstProductIn16Bits):
    def multiply(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        return super().multiply(x, weight, name) if name == "w2" else ReferenceExperts.multiply(self, x, weight, name)


class SmallWeightsDropped(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, weights=torch.where(call.weights < 0.1, 0, call.weights)))


class WeightsAtMostOne(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, weights=call.weights.clamp(max=1)))


class RowOfATileMissing(ReferenceExperts):
    """Of an expert with 64 tokens and one more, the last is lost."""

    def multiply(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        y = super().multiply(x, weight, name)
        if name == "w2" and x.shape[0] > 16 and x.shape[0] % 64 == 1:
            y[-1] = 0
        return y


class ExpertsScratchOfTheFirstCall(ReferenceExperts):
    rows_of_first = 0

    def apply(self, call: ExpertsCall) -> None:
        self.rows_of_first = self.rows_of_first or call.x.shape[0]
        super().apply(call)
        call.out[self.rows_of_first :] = 0


class NanOfAToken(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, x=call.x + 0 * call.x.sum()))


EXPERTS: dict[str, tuple[type[ReferenceExperts], str]] = {
    "first product in bfloat16": (FirstProductIn16Bits, "accumulation"),
    "second product in bfloat16": (SecondProductIn16Bits, "accumulation"),
    "small router weights": (SmallWeightsDropped, ""),
    "large router weights": (WeightsAtMostOne, ""),
    "row of a tile": (RowOfATileMissing, ""),
    "scratch of the first call": (ExpertsScratchOfTheFirstCall, ""),
    "NaN of a token": (NanOfAToken, ""),
}


@pytest.mark.parametrize("title", EXPERTS)
def test_a_fault_in_experts_is_caught(site: Site, title: str) -> None:
    kernel, code = EXPERTS[title]
    claims = [{"spec": ["bfloat16/bfloat16"]}, {"activation": ["silu_and_mul"]}]
    caught = first_failure(subject(site, kernel, "experts", requires=claims), ExpertsTrials(), plan=QUICK)
    assert caught, f"{title} was not caught"
    assert not code or code in caught.codes, str(caught)


# Ops.


def table_in_16_bits(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return rotary_embedding.reference(q, k, positions, cos_sin.to(q.dtype).float(), interleaved=interleaved)


def rotated_in_16_bits(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    table = cos_sin.to(q.dtype)
    return rotary_embedding.reference(q, k, positions, table, interleaved=interleaved)


def row_1024_missing(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    rotated, other = rotary_embedding.reference(q, k, positions, cos_sin, interleaved=interleaved)
    rotated[1024:] = 0
    return rotated, other


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rotate", [table_in_16_bits, rotated_in_16_bits, row_1024_missing])
def test_a_fault_in_a_rotation_is_caught(site: Site, rotate: Callable[..., Any], dtype: str) -> None:
    tried = subject(site, rotate, "op", "rotary_embedding", requires=[{"dtype": [dtype]}])
    caught = first_failure(tried, OpTrials(), plan=QUICK)
    assert caught, "not caught"
    assert rotate is row_1024_missing or caught.codes == {"accumulation"}


def test_a_written_spec_is_read_again(site: Site) -> None:
    from hardpoint.conformance.families.specs import parsed

    for text in ("int4@bfloat16:1x128+asym", "float8_e4m3fn@float32:128x128", "int8@float32:row+dynamic"):
        spec = parsed(text, site.plugins)
        assert isinstance(spec, QuantSpec)
        assert str(spec) == text
