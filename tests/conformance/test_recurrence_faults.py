"""Faults planted in gated delta nets and Mamba-2: in their ops, and in the layers. Each is caught by the cases of level
quick."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.layers import LayerTrials
from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.site import Site
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.gated_delta_net import GatedDeltaNet
from hardpoint.layers.kimi_delta import KimiDeltaAttention
from hardpoint.layers.mamba2 import Mamba2
from hardpoint.layers.states import StateMetadata
from hardpoint.ops import get
from hardpoint.ops.causal_conv import causal_conv
from hardpoint.ops.gated_rms_norm import gated_rms_norm
from hardpoint.ops.linear_recurrence import linear_recurrence_chunks, linear_recurrence_step
from hardpoint.ops.recurrence_gates import recurrence_gates
from hardpoint_plugin_api import AttentionBatch
from tests.conformance.trying import FEWER, HEALTHY, first_failure, subject
from tests.ops.judging import failures

Tensor = torch.Tensor
conv: Callable[..., Tensor] = causal_conv.reference
step: Callable[..., Tensor] = linear_recurrence_step.reference
chunks: Callable[..., Tensor] = linear_recurrence_chunks.reference
gates, norm = recurrence_gates.reference, gated_rms_norm.reference


def conv_writes_nothing(
    x: Tensor, w: Tensor, b: Tensor | None, states: Tensor, *rest: Tensor, **scalars: Any
) -> Tensor:
    return conv(x, w, b, states.clone(), *rest, **scalars)


def conv_one_token_late(x: Tensor, w: Tensor, *rest: Any, **scalars: Any) -> Tensor:
    return conv(x, w.roll(1, 1), *rest, **scalars)


def conv_state_one_token_short(
    x: Tensor, w: Tensor, b: Tensor | None, states: Tensor, pages: Tensor, *rest: Tensor, **scalars: Any
) -> Tensor:
    y = conv(x, w, b, states, pages, *rest, **scalars)
    states[pages] = states[pages].roll(1, 1)
    return y


def conv_not_reset(*args: Any, **scalars: Any) -> Tensor:
    *most, lengths = args
    return conv(*most, lengths + 1, **scalars)


def conv_prompts_forget(
    x: Tensor, w: Tensor, b: Any, states: Tensor, pages: Tensor, starts: Tensor, lengths: Tensor, **s: Any
) -> Tensor:
    counts = starts[1:] - starts[:-1]
    return conv(x, w, b, states, pages, starts, torch.where(counts > 1, counts, lengths), **s)


def conv_without_bias(x: Tensor, w: Tensor, b: Any, *rest: Any, **scalars: Any) -> Tensor:
    return conv(x, w, None, *rest, **scalars)


def step_writes_nothing(*args: Any, **scalars: Any) -> Tensor:
    *inputs, states, pages, lengths = args
    return step(*inputs, states.clone(), pages, lengths, **scalars)


def step_without_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any, **scalars: Any) -> Tensor:
    return step(q, k, v, g * 0, *rest, **scalars)


def step_without_beta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Any, **scalars: Any) -> Tensor:
    return step(q, k, v, g, torch.ones_like(beta), *rest, **scalars)


def step_not_reset(*args: Any, **scalars: Any) -> Tensor:
    *most, lengths = args
    return step(*most, lengths + 1, **scalars)


def step_with_another_key_head(q: Tensor, k: Tensor, *rest: Any, **scalars: Any) -> Tensor:
    return step(q.flip(1), k.flip(1), *rest, **scalars)


def step_without_delta_rule(*args: Tensor, delta_rule: bool, **scalars: Any) -> Tensor:
    return step(*args, delta_rule=False, **scalars)


def step_without_norm(*args: Tensor, normalize: bool, **scalars: Any) -> Tensor:
    return step(*args, normalize=False, **scalars)


def step_corrects_before_it_forgets(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, pages: Tensor, lengths: Tensor, **s: Any
) -> Tensor:
    """The prediction is read from the state before its decay."""
    if s["delta_rule"]:
        old = states[pages].masked_fill((lengths == 1)[:, None, None, None], 0.0)
        unit = k.float() * torch.rsqrt(k.float().square().sum(-1, keepdim=True) + 1e-6)
        unit = unit.repeat_interleave(v.shape[1] // k.shape[1], 1)
        faded = old * (g.exp() if g.dim() == 3 else g.exp()[..., None])[..., None, :]
        v = (v.float() + ((faded - old) @ unit[..., None])[..., 0]).to(v.dtype)
    return step(q, k, v, g, beta, states, pages, lengths, **s)


def chunks_write_nothing(*args: Any, **scalars: Any) -> Tensor:
    *inputs, states, pages, query_start, lengths = args
    return chunks(*inputs, states.clone(), pages, query_start, lengths, **scalars)


def chunks_forget_at_edges(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any, **scalars: Any) -> Tensor:
    """A state is dropped at each 64th token of a request."""
    edges = g.clone()
    for first, last in pairwise(scalars["starts"]):
        edges[first + 64 : last : 64] = -1e3
    return chunks(q, k, v, edges, *rest, **scalars)


def chunks_begin_anew(*args: Any, **scalars: Any) -> Tensor:
    *most, query_start, _ = args
    return chunks(*most, query_start, query_start[1:] - query_start[:-1], **scalars)


def chunks_leave_out_the_last_token(*args: Any, **scalars: Any) -> Tensor:
    """The last token is forgotten for, and not taken in."""
    q, k, v, g, beta, states, *rest = args
    out = chunks(q, k, v, g, beta, states.clone(), *rest, **scalars)
    kept = beta.clone()
    for first, last in pairwise(scalars["starts"]):
        kept[first:last][-1:] = 0.0
    chunks(q, k, v, g, kept, states, *rest, **scalars)
    return out


def beta_is_not_squashed(a: Tensor, b: Tensor | None, *rest: Any, **scalars: Any) -> tuple[Tensor, Tensor]:
    decay, beta = gates(a, b, *rest, **scalars)
    return decay, beta if b is None else b.float()


def gates_without_bias(a: Tensor, b: Tensor | None, rate: Tensor, bias: Tensor, *, low: float) -> tuple[Tensor, Tensor]:
    return gates(a, b, rate, bias * 0, low=low)


def gate_ignored(x: Tensor, gate: Tensor, weight: Tensor, **scalars: Any) -> Tensor:
    return norm(x, torch.ones_like(gate), weight, **scalars)


def gate_on_the_other_side(x: Tensor, gate: Tensor, weight: Tensor, *, gate_first: bool, **scalars: Any) -> Tensor:
    return norm(x, gate, weight, gate_first=not gate_first, **scalars)


def normed_across_groups(x: Tensor, gate: Tensor, weight: Tensor, **scalars: Any) -> Tensor:
    whole = weight.expand(x.shape[1:]).flatten()[None]
    return norm(x.flatten(1)[:, None], gate.flatten(1)[:, None], whole, **scalars).view(x.shape)


OPS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "inputs of the convolution not kept": (causal_conv, conv_writes_nothing),
    "convolution off by one": (causal_conv, conv_one_token_late),
    "kept inputs off by one": (causal_conv, conv_state_one_token_short),
    "kept inputs of the request before": (causal_conv, conv_not_reset),
    "kept inputs of a prompt's first chunk ignored": (causal_conv, conv_prompts_forget),
    "no bias": (causal_conv, conv_without_bias),
    "state not written": (linear_recurrence_step, step_writes_nothing),
    "nothing forgotten": (linear_recurrence_step, step_without_decay),
    "beta ignored": (linear_recurrence_step, step_without_beta),
    "state of the request before": (linear_recurrence_step, step_not_reset),
    "another key head": (linear_recurrence_step, step_with_another_key_head),
    "no correction": (linear_recurrence_step, step_without_delta_rule),
    "keys not normed": (linear_recurrence_step, step_without_norm),
    "corrected before the decay": (linear_recurrence_step, step_corrects_before_it_forgets),
    "state of a prompt not written": (linear_recurrence_chunks, chunks_write_nothing),
    "state dropped at chunk edges": (linear_recurrence_chunks, chunks_forget_at_edges),
    "a later chunk of a prompt begins anew": (linear_recurrence_chunks, chunks_begin_anew),
    "the last token not in the state": (linear_recurrence_chunks, chunks_leave_out_the_last_token),
    "beta without its sigmoid": (recurrence_gates, beta_is_not_squashed),
    "no bias of the step": (recurrence_gates, gates_without_bias),
    "gate ignored": (gated_rms_norm, gate_ignored),
    "gate on the other side of the norm": (gated_rms_norm, gate_on_the_other_side),
    "normed across heads": (gated_rms_norm, normed_across_groups),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("title", OPS)
def test_faults_of_ops(title: str, dtype: torch.dtype) -> None:
    op, fault = OPS[title]
    assert failures(op, fault, dtype), f"{title} was not caught"


@HEALTHY
@pytest.mark.parametrize("name", sorted({op.name for op, _ in OPS.values()}))
def test_the_references_pass(site: Site, every: int, name: str) -> None:
    caught = first_failure(subject(site, get(name).reference, "op", name), OpTrials(), every=every)
    assert caught is None, str(caught)


# The layers.


class ReadsTheGateOfAnotherHead(GatedDeltaNet):
    def bind(self) -> None:
        super().bind()
        given = self._norm
        self._norm = lambda x, gate, weight, **scalars: given(x, gate.roll(1, 1), weight, **scalars)


class SwapsBetaAndDecay(GatedDeltaNet):
    def bind(self) -> None:
        super().bind()
        given = self._gates
        self._gates = lambda a, b, rate, bias, *, low: given(b if b is not None else a, a, rate, bias, low=low)


class StatesOfTheFirstBlock(GatedDeltaNet):
    """States stay in the page of a request's first block."""

    def _advance(self, cache: dict[str, Tensor], plan: StateMetadata, *tensors: Tensor) -> None:
        super()._advance(cache, StateMetadata.in_place(plan.batch, plan.batch.block_table[:, 0].long()), *tensors)


class ForgetsTheConvolution(GatedDeltaNet):
    """Each step begins with a convolution over zeros."""

    def _advance(self, cache: dict[str, Tensor], plan: StateMetadata, *tensors: Tensor) -> None:
        super()._advance({**cache, "conv": torch.zeros_like(cache["conv"])}, plan, *tensors)


class TakesPromptsForDecodes(GatedDeltaNet):
    """Of each request beside a prompt, the first token alone is read."""

    def _advance(self, cache: dict[str, Tensor], plan: StateMetadata, *tensors: Tensor) -> None:
        batch: AttentionBatch = plan.batch
        if batch.num_decodes < batch.num_requests:
            first = batch.query_start[:-1].long()
            few = [x[first].clone() for x in tensors]
            alone = AttentionBatch(
                torch.arange(len(first) + 1, dtype=torch.int32),
                batch.seq_lens,
                batch.block_table,
                batch.slot_mapping,
                tuple(range(len(first) + 1)),
                batch.seq_lens_host,
                len(first),
            )
            assert plan.pages is not None
            super()._advance(cache, StateMetadata.in_place(alone, plan.pages), *few)
            tensors[-1].zero_()
            tensors[-1][first] = few[-1]
            return
        super()._advance(cache, plan, *tensors)


class SkipsNothing(Mamba2):
    """Inputs are not added to results."""

    def _advance(self, cache: dict[str, Tensor], plan: StateMetadata, *tensors: Tensor) -> None:
        skip = self.weights["skip"]
        self.weights["skip"] = torch.zeros_like(skip)
        super()._advance(cache, plan, *tensors)
        self.weights["skip"] = skip


class SwapsInputAndOutput(Mamba2):
    """B and C are taken for one another."""

    def bind(self) -> None:
        super().bind()
        given = self._recurrence.advance

        def advance(inputs: tuple[Tensor, ...], *rest: Any) -> None:
            c, b, *others = inputs
            given((b, c, *others), *rest)

        self._recurrence.advance = advance  # type: ignore[method-assign, assignment]


class StepsMayBeSmall(Mamba2):
    """The least step is ignored."""

    def bind(self) -> None:
        super().bind()
        given = self._gates
        self._gates = lambda a, b, rate, bias, *, low: given(a, b, rate, bias, low=0.0)


LAYERS = (
    ReadsTheGateOfAnotherHead,
    SwapsBetaAndDecay,
    StatesOfTheFirstBlock,
    ForgetsTheConvolution,
    TakesPromptsForDecodes,
    SkipsNothing,
    SwapsInputAndOutput,
    StepsMayBeSmall,
)
CLAIMS = [{"dtype": ["float32"]}]


@pytest.mark.parametrize("layer", LAYERS)
def test_faults_of_layers(site: Site, layer: type[PluggableLayer]) -> None:
    of = "mamba2" if issubclass(layer, Mamba2) else "gated_delta_net"
    tried = subject(site, layer, "layer", of, "default", requires=CLAIMS)
    caught = first_failure(tried, LayerTrials(), "*/tokens-*")
    assert caught, f"{layer.__name__} was not caught"
    assert caught.check == "values", str(caught)


@FEWER
@pytest.mark.parametrize("layer", [GatedDeltaNet, KimiDeltaAttention, Mamba2])
def test_healthy_layers_pass(site: Site, layer: type[PluggableLayer], every: int) -> None:
    tried = subject(site, layer, "layer", layer.pluggable_name, "default", requires=CLAIMS)
    caught = first_failure(tried, LayerTrials(), every=every)
    assert caught is None, str(caught)
