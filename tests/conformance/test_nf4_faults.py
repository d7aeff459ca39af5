"""A linear kernel for an element of a plugin's own: the kit makes its trials, and catches the faults planted in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from hardpoint.conformance.families import specs
from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.site import Site
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint_plugin_api import Contribution, LinearCall, LinearKernel
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject
from tests.quantization.test_elements import NF4

GROUP = 64
pytestmark = pytest.mark.skipif(
    not hasattr(specs, "claimed_specs"), reason="linear's trials are made from fixed lists, not from the manifest yet"
)


class WithNf4(PluginSet):
    """Installed plugins, and one that offers the element."""

    def offers(self, family: str, of: str | None = None) -> list[Offer]:
        found = super().offers(family, of)
        if family != "element":
            return found
        return [*found, replace(found[0], contribution=Contribution("element", "nf4", "acme.nf4:NF4"), plugin="acme")]

    def load(self, offer: Offer) -> object:
        return NF4 if offer.plugin == "acme" else super().load(offer)


class Nf4Linear(LinearKernel):
    """Right."""

    def numbers(self, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        packed, scale = weights["weight"], self.scale(weights["weight_scale"])
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
        columns = torch.arange(codes.shape[1])
        return (NF4.decode(codes, torch.float32) * scale[:, self.group(columns)]).to(dtype)

    def scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def group(self, columns: torch.Tensor) -> torch.Tensor:
        return columns // GROUP

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        return linear(x, self.numbers(weights, x.dtype), bias)


class LastScaleIgnored(Nf4Linear):
    def scale(self, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.clone()
        scale[:, -1] = scale[:, 0]
        return scale


class EdgeOffByOne(Nf4Linear):
    """The last column of each block takes the next block's scale."""

    def group(self, columns: torch.Tensor) -> torch.Tensor:
        return ((columns + 1) // GROUP).clamp(max=int(columns[-1]) // GROUP)


class SumsInBfloat16(Nf4Linear):
    """Adds products up in bfloat16, a block of 16 columns at a time."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        w = self.numbers(weights, torch.float32)
        y = torch.zeros(*x.shape[:-1], w.shape[0], dtype=torch.bfloat16)
        for start in range(0, x.shape[-1], 16):
            part = slice(start, start + 16)
            y = (y.float() + x[..., part].float() @ w[:, part].t()).to(torch.bfloat16)
        y = y.to(x.dtype)
        return y if bias is None else y + bias


def tried(site: Site, kernel: type[LinearKernel], cases: str = "*", every: int = 1) -> Caught | None:
    nf4 = replace(site, plugins=WithNf4(site.plugins.records))
    claims: list[Any] = [{"spec": ["nf4@float32:1x64/float32", "nf4@float32:1x64/bfloat16"]}]
    made = subject(nf4, kernel, "linear", name="emulated", requires=claims)
    return first_failure(made, LinearTrials(), cases, every=every)


@HEALTHY
def test_the_right_one_passes(site: Site, every: int) -> None:
    assert tried(site, Nf4Linear, "*nf4*", every) is None


@pytest.mark.parametrize("kernel", [LastScaleIgnored, EdgeOffByOne, SumsInBfloat16])
def test_a_fault_is_caught(site: Site, kernel: Callable[..., Any]) -> None:
    caught = tried(site, kernel)  # type: ignore[arg-type]  # a class by any name
    assert caught is not None
    assert "nf4" in caught.case
    assert caught.check in ("values", "sizes"), caught
