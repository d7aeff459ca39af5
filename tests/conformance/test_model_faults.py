"""Faults planted in models: each is caught, by the check that should."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.conformance.families.model_samples import ModelSample, Reference, transformers_samples
from hardpoint.conformance.families.models import ModelTrials
from hardpoint.conformance.generators import Generator, generator_for
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.context import Context
from hardpoint.layers import CausalLM, CausalLMArgs
from hardpoint.models import decoder as parts
from hardpoint.models.decoder import Block, Sublayer, decoder, num_layers
from hardpoint.models.family import ModelArgs
from hardpoint.models.llama import llama
from hardpoint_plugin_api import AttentionArgs, CheckpointError, ForwardStep, MLPArgs, NormArgs
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor
Builder = Callable[[HFConfig], ModelArgs]
LLAMA = "LlamaForCausalLM"


def changed(
    attention: Callable[[AttentionArgs], AttentionArgs] = lambda args: args,
    mlp: Callable[[MLPArgs], MLPArgs] = lambda args: args,
    norm: Callable[[NormArgs], NormArgs] = lambda args: args,
    layers: Callable[[int], int] = lambda count: count,
) -> Builder:
    """Llama with other arguments for its layers."""

    def build(config: HFConfig) -> CausalLMArgs:
        bias = config.flag("attention_bias", False)
        mixer = parts.attention(config, qkv_bias=bias, out_bias=bias)
        feed_forward, norms = parts.mlp(config, bias=config.flag("mlp_bias", False)), parts.norms(config)
        block = Block(
            mixer=Sublayer(attention(mixer.args), mixer.names),
            feed_forward=Sublayer(mlp(feed_forward.args), feed_forward.names),
            norms=Sublayer(norm(norms.args), norms.names),
        )
        return decoder(config, [block] * layers(num_layers(config)))

    return build


def renamed(change: Callable[[str], str | None]) -> Builder:
    """Llama, with weights in other places: ``change`` says where what goes to an address belongs."""

    def moved(address: object) -> str | None:
        return change(address) if isinstance(address, str) else None

    def build(config: HFConfig) -> CausalLMArgs:
        args = llama(config)
        return replace(args, weight_names={name: moved(address) for name, address in args.weight_names.items()})

    return build


def wrapped(hidden: Callable[[CausalLM, Tensor, ForwardStep], Tensor]) -> Builder:
    """Llama with another ``hidden``."""

    class Other(CausalLM):
        def hidden(self, ids: Tensor, step: ForwardStep) -> Tensor:
            return hidden(self, ids, step)

    class OtherArgs(CausalLMArgs):
        def build(self, ctx: Context) -> CausalLM:
            return Other(ctx, self)

    return lambda config: OtherArgs(**vars(llama(config)))


def _plain(model: CausalLM, ids: Tensor, step: ForwardStep) -> Tensor:
    return CausalLM.hidden(model, ids, step)


def _counts_positions_in_the_step(model: CausalLM, ids: Tensor, step: ForwardStep) -> Tensor:
    return _plain(model, ids, replace(step, rotary_positions=torch.arange(len(ids), device=ids.device)))


def _one_sequence_alone(model: CausalLM, ids: Tensor, step: ForwardStep) -> Tensor:
    """Takes the positions of all rows to follow the first's."""
    following = step.positions[0] + torch.arange(len(ids), device=ids.device)
    return _plain(model, ids, replace(step, rotary_positions=following))


def _keeps_the_first_stream(model: CausalLM, ids: Tensor, step: ForwardStep) -> Tensor:
    hidden = _plain(model, ids, step)
    kept: Tensor = model.__dict__.setdefault("kept", hidden[:1].clone())
    return hidden + 1e-3 * (kept - hidden[:1])


def _rounds_to_bfloat16(model: CausalLM, ids: Tensor, step: ForwardStep) -> Tensor:
    return _plain(model, ids, step).bfloat16().float()


def _looks_at_its_neighbours(model: CausalLM, ids: Tensor, step: ForwardStep) -> Tensor:
    """Off by a rounding, which differs with the number of rows: within every bound, and not batch invariant."""
    return _plain(model, ids, step) * (1 + 2.0**-23 * (len(ids) % 3))


def _refuses(config: HFConfig) -> CausalLMArgs:
    raise CheckpointError(f"{config.path}: not today")


def _swap(one: str, other: str) -> Callable[[str], str | None]:
    def swapped(address: str) -> str:
        return address.replace(one, "?").replace(other, one).replace("?", other)

    return swapped


PLANTED: dict[str, tuple[Builder, str]] = {
    "another scale": (changed(attention=lambda a: replace(a, scale=a.scale * 1.01)), "values"),
    "another theta": (
        changed(attention=lambda a: replace(a, rope=a.rope and replace(a.rope, theta=20_000.0))),
        "values",
    ),
    "interleaved rotation": (
        changed(attention=lambda a: replace(a, rope=a.rope and replace(a.rope, interleaved=True))),
        "values",
    ),
    "no rotation": (changed(attention=lambda a: replace(a, rope=None)), "values"),
    "a window that is not asked for": (changed(attention=lambda a: replace(a, window=32)), "values"),
    "another activation": (changed(mlp=lambda a: replace(a, activation="gelu")), "values"),
    "another epsilon": (changed(norm=lambda a: replace(a, eps=1e-5)), "values"),
    "a norm of queries and keys": (changed(attention=lambda a: replace(a, qk_norm_eps=1e-6)), "loads"),
    "a layer left out": (changed(layers=lambda count: count - 1), "loads"),
    "gate and up swapped": (renamed(_swap("gate_up.weight[gate]", "gate_up.weight[up]")), "values"),
    "the two norms of a block swapped": (renamed(_swap("mixer_norm.weight", "feed_forward_norm.weight")), "values"),
    "a tensor that is not read": (
        renamed(lambda address: None if address == "stack.blocks.1.feed_forward.down.weight" else address),
        "loads",
    ),
    "positions counted in the step": (wrapped(_counts_positions_in_the_step), "chunks"),
    "positions of one sequence": (wrapped(_one_sequence_alone), "batch"),
    "something kept of the first step": (wrapped(_keeps_the_first_stream), "chunks"),
    "rounding by the number of rows": (wrapped(_looks_at_its_neighbours), "batch-invariant"),
    "hidden states in bfloat16": (wrapped(_rounds_to_bfloat16), "values"),
    "a right config refused": (_refuses, "loads"),
    "no model": (lambda config: None, "loads"),  # type: ignore[dict-item,return-value]  # the fault
}


def tried(site: Site, builder: Builder, generator: Generator | None = None) -> Caught | None:
    claims = [{"feature": ["batch_invariant"]}]
    claiming = subject(site, builder, "model", LLAMA, "llama", requires=claims)
    return first_failure(claiming, generator or ModelTrials(), "plain")


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    builder, check = PLANTED[title]
    caught = tried(site, builder)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


def test_a_healthy_model_passes(site: Site) -> None:
    for builder in (changed(), renamed(lambda address: address), wrapped(_plain)):
        caught = tried(site, builder)
        assert caught is None, str(caught)


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
def test_all_of_cores_models_pass_and_are_proved(site: Site, every: int) -> None:
    """In part: the values of one trial of each model, and all checks of that for one model in six.

    How a model of each family goes through chunks and batches is compared with Transformers in tests/models, too.
    """
    for number, offer in enumerate(site.plugins.offers("model")):
        generator = generator_for(site.plugins, offer)
        assert generator is not None, f"{offer.contribution} has no reference"
        compared = 0
        for trial in islice(generator.trials(Subject.load(offer, site), Plan()), 0, None, every):
            for check, finding in trial.run():
                assert not finding.faults, f"{offer.contribution}, {trial.case}, {check}: {finding.faults[0]}"
                compared += finding.compared if check == "values" else 0
                if compared and every > 1 and number % 6:
                    break
        assert compared > 0


def _own_reference(folder: Path, seed: int) -> Reference:
    """Llama's checkpoint, under the name of an architecture that Transformers does not have."""
    reference = transformers_samples(LLAMA)[0].write(folder, seed)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["AcmeForCausalLM"]}))
    return reference


def test_an_architecture_of_a_plugins_own_has_a_reference_of_its_own(site: Site) -> None:
    own = ModelTrials({"AcmeForCausalLM": [ModelSample("plain", _own_reference)]})
    acme = subject(site, llama, "model", LLAMA, "llama")
    contribution = replace(acme.offer.contribution, of="AcmeForCausalLM")
    acme = replace(acme, offer=replace(acme.offer, contribution=contribution))
    assert not ModelTrials().serves(acme.offer.contribution)
    assert own.serves(acme.offer.contribution)
    assert first_failure(acme, own) is None
    faulty = replace(acme, target=changed(attention=lambda a: replace(a, scale=a.scale * 1.01)))
    caught = first_failure(faulty, own)
    assert caught
    assert caught.check == "values"
