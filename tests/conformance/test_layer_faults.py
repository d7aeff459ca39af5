"""Faults planted in layer replacements: each is caught, by the check that should."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from hardpoint.conformance.families.layers import LayerTrials
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers import PluggableLayer
from hardpoint_plugin_api import ConfigError, ForwardStep, MLPArgs, WeightSlot
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor


class Healthy(PluggableLayer):
    """A feed-forward gated by SiLU in one piece."""

    def __init__(self, ctx: Context, args: MLPArgs) -> None:
        super().__init__(ctx)
        if args.activation != "silu" or not args.gated or args.bias:
            raise ConfigError(f"{ctx.path}: gated by SiLU and without biases alone, not {args}")
        self.args, self.dtype = args, dtype_name(ctx.dtype)

    def declare(self) -> dict[str, WeightSlot]:
        width, hidden = self.args.intermediate_size, self.args.hidden_size
        return {
            "gate_up.weight": WeightSlot((2 * width, hidden), self.dtype, 0, (("gate", width), ("up", width))),
            "down.weight": WeightSlot((hidden, width), self.dtype, 1),
        }

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        gate, up = linear(x, self.weights["gate_up.weight"]).chunk(2, dim=-1)
        return linear(silu(gate) * up, self.weights["down.weight"])


class GateAndUpSwapped(Healthy):
    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        up, gate = linear(x, self.weights["gate_up.weight"]).chunk(2, dim=-1)
        return linear(silu(gate) * up, self.weights["down.weight"])


class AnotherActivation(Healthy):
    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        gate, up = linear(x, self.weights["gate_up.weight"]).chunk(2, dim=-1)
        return linear(gelu(gate) * up, self.weights["down.weight"])


class ForgetsASlot(Healthy):
    def declare(self) -> dict[str, WeightSlot]:
        return {name: slot for name, slot in super().declare().items() if name != "down.weight"}


class DeclaresTheTransposed(Healthy):
    def declare(self) -> dict[str, WeightSlot]:
        width, hidden = self.args.intermediate_size, self.args.hidden_size
        return {**super().declare(), "down.weight": WeightSlot((width, hidden), self.dtype, 0)}


class NamesPartsTheOtherWayRound(Healthy):
    def declare(self) -> dict[str, WeightSlot]:
        slots, width = super().declare(), self.args.intermediate_size
        slots["gate_up.weight"] = WeightSlot(
            (2 * width, self.args.hidden_size), self.dtype, 0, (("up", width), ("gate", width))
        )
        return slots


class KeepsThePacked(Healthy):
    """Packs weights once, gives the memory back, and never packs what is loaded later."""

    packed: Tensor | None = None

    def prepare(self) -> None:
        super().prepare()
        if self.packed is None:
            self.packed = self.weights["down.weight"].clone()

    def release(self) -> None:
        super().release()
        assert self.packed is not None
        self.packed.zero_()

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        gate, up = linear(x, self.weights["gate_up.weight"]).chunk(2, dim=-1)
        assert self.packed is not None
        return linear(silu(gate) * up, self.packed)


class HoldsAfterRelease(Healthy):
    def release(self) -> None:
        kept = dict(self.weights)
        super().release()
        self.weights.update(kept)


class WritesItsWeights(Healthy):
    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        y = super().forward(x, step)
        self.weights["down.weight"][0] += 1
        return y


class WritesItsInput(Healthy):
    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        y = super().forward(x, step)
        x.zero_()
        return y


PLANTED: dict[str, tuple[type[Healthy], str, str]] = {
    "gate and up swapped": (GateAndUpSwapped, "values", "*/tokens-*"),
    "another activation": (AnotherActivation, "values", "*/tokens-*"),
    "a slot forgotten": (ForgetsASlot, "slots", "*"),
    "a slot transposed": (DeclaresTheTransposed, "slots", "*"),
    "parts in another order": (NamesPartsTheOtherWayRound, "slots", "*"),
    "stale after reload": (KeepsThePacked, "lifecycle", "*"),
    "weights held after release": (HoldsAfterRelease, "lifecycle", "*"),
    "weights written": (WritesItsWeights, "values", "*/tokens-*"),
    "input written": (WritesItsInput, "values", "*/tokens-*"),
}


def tried(site: Site, layer: type[Healthy], cases: str = "*") -> Caught | None:
    claims = [{"dtype": ["float32"]}]
    return first_failure(subject(site, layer, "layer", "mlp", "default", requires=claims), LayerTrials(), cases)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    layer, check, cases = PLANTED[title]
    caught = tried(site, layer, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


def test_a_healthy_layer_passes(site: Site) -> None:
    caught = tried(site, Healthy)
    assert caught is None, str(caught)
