"""One pre-norm decoder block, with the fixed contract (x, residual) -> (x, residual)."""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer, build_layer, sum_later
from hardpoint.layers.norm import Norm
from hardpoint_plugin_api import BlockArgs, ForwardStep


class DecoderBlock(PluggableLayer, name="decoder_block"):
    """The mixer and the feed-forward that the arguments name, each behind a norm that adds to the residual stream."""

    def __init__(self, ctx: Context, args: BlockArgs) -> None:
        super().__init__(ctx)
        mixer = build_layer(ctx.child("mixer"), args.mixer)  # layers that read come before what writes for them
        feed_forward = build_layer(ctx.child("feed_forward"), args.feed_forward)
        self.mixer_norm = Norm(ctx.child("mixer_norm"), replace(args.norm, spec=mixer.input_spec))
        self.mixer = mixer
        self.feed_forward_norm = Norm(ctx.child("feed_forward_norm"), replace(args.norm, spec=feed_forward.input_spec))
        self.feed_forward = feed_forward
        if type(self).forward is DecoderBlock.forward:  # another may read what the mixer returns
            sum_later(ctx.child("feed_forward_norm"), mixer, self.feed_forward_norm)

    def return_partial_sums(self) -> bool:
        return self.feed_forward.return_partial_sums()

    @property
    def takes_partial_sums(self) -> bool:
        return self.mixer_norm.takes_partial_sums

    def take_partial_sums(self, ctx: Context) -> None:
        self.mixer_norm.take_partial_sums(ctx.child("mixer_norm"))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, hidden] -> x, residual. The first block gets no residual; the sum of both is the stream."""
        x, residual = self.mixer_norm(x, residual)
        x = self.mixer(x, step)
        x, residual = self.feed_forward_norm(x, residual)
        return self.feed_forward(x, step), residual
