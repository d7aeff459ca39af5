"""Faults planted in a replacement of the layer ``moe``: each is caught, by the check that should."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import one_hot, silu

from hardpoint.conformance.families.certain_routing import certain_tokens, is_certain, router_weight
from hardpoint.conformance.families.layer_kinds import KINDS
from hardpoint.conformance.families.layers import LayerTrials
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.layers.moe import MoE
from hardpoint.ops.route_topk import route_topk, settings
from hardpoint_plugin_api import ConfigError, ForwardStep, MoEArgs, RouterArgs
from tests.conformance.trying import FEWER, Caught, first_failure, subject

Tensor = torch.Tensor


class Healthy(MoE):
    """Every expert for every token, times a weight that is zero where the router did not choose it."""

    capturable = True

    def __init__(self, ctx: Context, args: MoEArgs) -> None:
        if args.activation != "silu" or not args.gated:
            raise ConfigError(f"{ctx.path}: gated by SiLU alone, not {args}")
        super().__init__(ctx, args)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        logits = self.router(x, step)
        ids, weights = self.route(logits, self.weights.get("correction_bias"))
        y = self.mix(x, ids.long(), weights)
        return y + self.beside(x, step) if self.shared is not None else y

    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return route_topk.reference(logits, bias, **settings(self.args.router))

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not self.args.weights_on_input:
            return self.sum(x, ids, weights)
        columns = zip(ids.split(1, 1), weights.split(1, 1), strict=True)
        sums = [self.sum((x * weight).to(x.dtype), expert, torch.ones_like(weight)) for expert, weight in columns]
        return torch.stack(sums).sum(0)

    def sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        shares = (one_hot(ids, self.args.router.num_experts) * weights.float().unsqueeze(-1)).sum(1)
        gate, up = torch.einsum("th,eoh->teo", x, self.experts.weights["w13.weight"]).chunk(2, dim=-1)
        y = torch.einsum("tei,ehi->teh", silu(gate) * up, self.experts.weights["w2.weight"])
        return (y.float() * shares.unsqueeze(-1)).sum(1).to(x.dtype)

    def beside(self, x: Tensor, step: ForwardStep) -> Tensor:
        assert self.shared is not None
        shared: Tensor = self.shared(x, step)
        return shared if self.shared_gate is None else shared * torch.sigmoid(self.shared_gate(x, step))


class ChoosesByRoundedLogits(Healthy):
    """Right, too: rounding decides nothing, and weights are those of the logits as they are."""

    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, _ = super().route(logits.bfloat16().to(logits.dtype), bias)
        scores = logits.float().softmax(-1) if self.args.router.scoring == "softmax" else logits.float().sigmoid()
        weights = scores.gather(-1, ids.long())
        if self.args.router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * self.args.router.scaling


class TakesTheNextBest(Healthy):
    """The last of the chosen is one rank too low."""

    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(logits, bias)
        following = settings(self.args.router) | {"top_k": self.args.router.top_k + 1}
        more, _ = route_topk.reference(logits, bias, **following)
        return torch.cat([ids[:, :-1], more[:, -1:]], -1), weights


class ForgetsTheBias(Healthy):
    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().route(logits, None)


class WeighsWithTheBias(Healthy):
    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(logits, bias)
        return ids, weights if bias is None else weights + 0.1 * bias[ids.long()]


class ForgetsTheGroups(Healthy):
    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        all_of_them = settings(self.args.router) | {"num_groups": 1, "top_groups": 1}
        return route_topk.reference(logits, bias, **all_of_them)


class DoesNotRenormalise(Healthy):
    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return route_topk.reference(logits, bias, **settings(self.args.router) | {"renormalize": False})


class ForgetsTheScaling(Healthy):
    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return route_topk.reference(logits, bias, **settings(self.args.router) | {"scaling": 1.0})


class SwapsWeights(Healthy):
    """The best expert's weight goes to the second."""

    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(logits, bias)
        return ids, weights.flip(-1)


class DropsWhatIsOverCapacity(Healthy):
    """An expert takes eight tokens of a step at most."""

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        chosen = one_hot(ids, self.args.router.num_experts).sum(1)
        is_over = (chosen.cumsum(0) > 8).gather(-1, ids)
        return super().mix(x, ids, weights.masked_fill(is_over, 0.0))


class WeighsInputs(Healthy):
    """Multiplies what goes into an expert: for an activation that is not linear that is something else."""

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        parts = [super(WeighsInputs, self).mix(x * w, i, torch.ones_like(w)) for i, w in _by_rank(ids, weights)]
        return torch.stack(parts).sum(0)


class WeighsResults(Healthy):
    """Multiplies what comes out of an expert, wherever the weight belongs."""

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.sum(x, ids, weights)


def _by_rank(ids: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(ids[:, [k]], weights[:, [k]].to(weights.dtype)) for k in range(ids.shape[1])]


class ForgetsTheSharedExpert(Healthy):
    def beside(self, x: Tensor, step: ForwardStep) -> Tensor:
        return torch.zeros_like(x)


class DoesNotSquashTheSharedGate(Healthy):
    def beside(self, x: Tensor, step: ForwardStep) -> Tensor:
        assert self.shared is not None
        return super().beside(x, step) if self.shared_gate is None else self.shared(x, step) * self.shared_gate(x, step)


class KeepsTheFirstChoice(Healthy):
    """Routes all later steps as the first one of their size."""

    def route(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        kept = self.__dict__.setdefault("kept", {})
        ids, weights = kept.setdefault(len(logits), super().route(logits, bias))
        return ids.clone(), weights.clone()


class ForgetsASlot(Healthy):
    def declare(self) -> dict[str, object]:  # type: ignore[override]  # the fault
        return {}


PLANTED: dict[str, tuple[type[Healthy], str, str]] = {
    "the next best expert": (TakesTheNextBest, "values", "*/plain/tokens-*"),
    "the bias forgotten": (ForgetsTheBias, "values", "*/tokens-33"),
    "the bias in the weights": (WeighsWithTheBias, "values", "*/tokens-*"),
    "groups forgotten": (ForgetsTheGroups, "values", "*/*groups/tokens-*"),
    "not renormalised": (DoesNotRenormalise, "values", "*/tokens-*"),
    "scaling forgotten": (ForgetsTheScaling, "values", "*/tokens-*"),
    "weights swapped": (SwapsWeights, "values", "*/tokens-*"),
    "tokens over capacity dropped": (DropsWhatIsOverCapacity, "values", "*/tokens-*"),
    "inputs weighed": (WeighsInputs, "values", "*/tokens-*"),
    "results weighed": (WeighsResults, "values", "*/weights-on-input/tokens-*"),
    "the shared expert forgotten": (ForgetsTheSharedExpert, "values", "*/tokens-*"),
    "the shared gate not squashed": (DoesNotSquashTheSharedGate, "values", "*/tokens-*"),
    "the first choice kept": (KeepsTheFirstChoice, "fresh", "*/plain/tokens-*"),
    "a slot forgotten": (ForgetsASlot, "slots", "*"),
}


def tried(site: Site, layer: type[MoE], cases: str = "*", every: int = 1) -> Caught | None:
    made = subject(site, layer, "layer", "moe", "default", requires=[{"dtype": ["float32"]}])
    return first_failure(made, LayerTrials(), cases, every=every)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    layer, check, cases = PLANTED[title]
    caught = tried(site, layer, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@FEWER
@pytest.mark.parametrize("layer", [Healthy, ChoosesByRoundedLogits, MoE])
def test_a_healthy_layer_passes(site: Site, layer: type[MoE], every: int) -> None:
    caught = tried(site, layer, every=every)
    assert caught is None, str(caught)


MOE = {name: args for name, args in KINDS["moe"].variations.items() if isinstance(args, MoEArgs)}


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_decides_no_choice(name: str, dtype: torch.dtype) -> None:
    """Inputs, weights and logits in 16 bits choose what float64 chooses."""
    args = MOE[name]
    x = certain_tokens(args, 500, torch.Generator().manual_seed(1))
    weight = router_weight(args)
    bias = KINDS["moe"].weights(args).get("correction_bias")
    exact, _ = route_topk.reference(
        x.double() @ weight.double().T, bias if bias is None else bias.double(), **settings(args.router)
    )
    rounded = (x.to(dtype) @ weight.to(dtype).T).float()
    found, _ = route_topk.reference(rounded, bias, **settings(args.router))
    assert torch.equal(exact.sort().values, found.sort().values)


def test_a_tie_is_not_certain() -> None:
    router = RouterArgs(4, 2)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.95, 0.0], [3.0, 2.95, 1.0, 0.0]], dtype=torch.float64)
    assert is_certain(router, logits).tolist() == [True, False, True]
