"""One pre-norm decoder block, with the fixed contract (x, residual) -> (x, residual)."""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint.context import Context
from hardpoint.layers.attention import Attention
from hardpoint.layers.base import PluggableLayer, sum_later
from hardpoint.layers.mlp import MLP
from hardpoint.layers.moe import MoE
from hardpoint.layers.norm import Norm
from hardpoint_plugin_api import BlockArgs, ForwardStep, MoEArgs


class DecoderBlock(PluggableLayer, name="decoder_block"):
    """Attention and feed-forward, each behind a norm that also adds to the residual stream."""

    def __init__(self, ctx: Context, args: BlockArgs) -> None:
        super().__init__(ctx)
        inner = ctx.child("mlp")  # layers that read come before what writes for them
        attention = Attention(ctx.child("attention"), args.attention)
        mlp = MoE(inner, args.mlp) if isinstance(args.mlp, MoEArgs) else MLP(inner, args.mlp)
        self.attention_norm = Norm(ctx.child("attention_norm"), replace(args.norm, spec=attention.input_spec))
        self.attention = attention
        self.mlp_norm = Norm(ctx.child("mlp_norm"), replace(args.norm, spec=mlp.input_spec))
        self.mlp = mlp
        if type(self).forward is DecoderBlock.forward:  # another may read what attention returns
            sum_later(ctx.child("mlp_norm"), attention, self.mlp_norm)

    def leave_summand(self) -> bool:
        return self.mlp.leave_summand()

    @property
    def takes_summand(self) -> bool:
        return self.attention_norm.takes_summand

    def take_summand(self, ctx: Context) -> None:
        self.attention_norm.take_summand(ctx.child("attention_norm"))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, hidden] -> x, residual. The first block gets no residual; the sum of both is the stream."""
        x, residual = self.attention_norm(x, residual)
        x = self.attention(x, step)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual
