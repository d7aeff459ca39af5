"""A model of Acme's own, of layers that core does not know: two mixers, and a feed-forward by position.

Axes: T tokens, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from acme_hp.fading import FadingArgs
from hardpoint.attention.build import attention_backend
from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers import CausalLMArgs, PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.models.decoder import Block, Sublayer, decoder, linear_names, mlp, norms, num_layers
from hardpoint_plugin_api import AttentionCall, AttentionSpec, ForwardStep, LinearArgs, StoreCall, WeightSlot

FADE = 0.8
"""How much of a sum is left one token later."""


@dataclass(frozen=True)
class MeanArgs:
    """A mixer: each token gets the mean of its sequence's values so far, its own included."""

    layer: ClassVar[str] = "acme_mean"

    hidden_size: int
    num_heads: int
    head_size: int


@dataclass(frozen=True)
class StripesArgs:
    """A feed-forward: each position, modulo ``period``, has a factor for every channel."""

    layer: ClassVar[str] = "acme_stripes"

    hidden_size: int
    period: int


class AcmeMean(PluggableLayer, name="acme_mean"):
    """Values stand in the cache of an attention backend; where queries are zero, it weighs all values alike."""

    traceable = True

    def __init__(self, ctx: Context, args: MeanArgs) -> None:
        super().__init__(ctx)
        self.args, width = args, args.num_heads * args.head_size
        self.value = Linear(ctx.child("value"), LinearArgs(args.hidden_size, (("value", width),)))
        self.out = Linear(ctx.child("out"), LinearArgs(width, (("out", args.hidden_size),)))
        heads, size = args.num_heads, args.head_size
        spec = AttentionSpec(heads, heads, size, 1.0, dtype_name(ctx.dtype), ctx.kv_dtype, ctx.block_size)
        self.index, self.backend, _ = attention_backend(ctx, spec)

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Writes this step's values to the layer's cache."""
        values = self.value(x, step).view(x.shape[0], self.args.num_heads, self.args.head_size)
        zeros, means = torch.zeros_like(values), torch.empty_like(values)
        slots = step.metadata[self.index].batch.slot_mapping
        self.backend.store(StoreCall(zeros, values, step.caches[self.index], slots))
        attend = self.backend.forward
        step.interrupt(
            self.index,
            lambda cache, plan, zeros, values, out: attend(AttentionCall(zeros, zeros, values, cache, plan, out)),
            *(zeros, values, means),
        )
        y: torch.Tensor = self.out(means.view(x.shape[0], -1), step)
        return y


class AcmeStripes(PluggableLayer, name="acme_stripes"):
    """Slot: weight [period, hidden]."""

    traceable = True

    def __init__(self, ctx: Context, args: StripesArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)

    def declare(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot((self.args.period, self.args.hidden_size), self.dtype)}

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return x * self.weights["weight"][step.positions % self.args.period]


def means(config: HFConfig) -> CausalLMArgs:
    """By turns means with core's feed-forward, and fading sums with Acme's."""
    hidden = config.integer("hidden_size")
    mixer = Sublayer(
        MeanArgs(hidden, config.integer("num_attention_heads"), config.integer("head_dim")),
        linear_names({"mean.value_proj": "value", "mean.out_proj": "out"}),
    )
    stripes = Sublayer(StripesArgs(hidden, config.integer("acme_period")), {"stripes": "weight"})
    fading = Sublayer(
        FadingArgs(hidden, mixer.args.num_heads * mixer.args.head_size, FADE),
        linear_names({"fading.value_proj": "value", "fading.out_proj": "out"}),
    )
    dense, norm = mlp(config), norms(config)
    return decoder(
        config,
        [Block(fading if i % 2 else mixer, stripes if i % 2 else dense, norm) for i in range(num_layers(config))],
    )
