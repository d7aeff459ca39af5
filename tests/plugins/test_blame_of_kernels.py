"""A kernel that misbehaves while it is built, or while its weights load, raises an error that names its plugin."""

from __future__ import annotations

import pytest
import torch

from hardpoint.layers.base import checked_weights
from hardpoint.plugin_host import Offer, discover
from hardpoint.plugin_host.blame import construct
from hardpoint_plugin_api import LinearCall, LinearKernel, LinearWorkload, PluginLoadError


class NotInitialised(LinearKernel):
    def __init__(self, ctx: object, workload: LinearWorkload) -> None:
        pass

    def apply(self, call: LinearCall) -> torch.Tensor:
        return call.x


class AnyContext:
    def for_plugin(self, plugin: str) -> object:
        return self


@pytest.fixture
def offer() -> Offer:
    return next(iter(discover().offers("linear", None)))


def test_a_constructor_that_does_not_call_its_base(offer: Offer) -> None:
    with pytest.raises(PluginLoadError, match=rf"plugin {offer.plugin}: .*does not call super\(\).__init__\(\)"):
        construct(offer, NotInitialised, LinearKernel, AnyContext(), LinearWorkload())


@pytest.mark.parametrize("packed", [None, [], {"weight": [1.0]}, {1: torch.zeros(1)}], ids=repr)
def test_packed_weights_that_are_no_tensors_by_name(offer: Offer, packed: object) -> None:
    with pytest.raises(PluginLoadError, match=rf"plugin {offer.plugin}: .*tensors by name from prepack\(\), got "):
        checked_weights(offer, packed)


def test_packed_weights_are_returned(offer: Offer) -> None:
    packed = {"weight": torch.zeros(1)}
    assert checked_weights(offer, packed) is packed
