"""One decoder block, with the fixed contract (x, residual) -> (x, residual)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import cast

import torch

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer, build_layer, sum_later
from hardpoint.layers.norm import Norm, ResidualSum
from hardpoint_plugin_api import BlockArgs, ForwardStep


class DecoderBlock(PluggableLayer, name="decoder_block"):
    """The mixer and the feed-forward that the arguments name, each behind a norm that adds to the residual stream.

    Without ``pre_norm`` each is behind the sum alone.
    """

    def __init__(self, ctx: Context, args: BlockArgs) -> None:
        super().__init__(ctx)
        named = {"mixer": args.mixer, "feed_forward": args.feed_forward}
        # Layers that read come before what writes for them.
        layers = {name: build_layer(ctx.child(name), of) for name, of in named.items() if of is not None}
        for name, layer in layers.items():
            place = ctx.child(f"{name}_norm")
            norm = (
                Norm(place, replace(args.norm, spec=layer.input_spec))
                if args.pre_norm
                else ResidualSum.as_it_stands(place)
            )
            self.add_module(f"{name}_norm", norm)
            self.add_module(name, layer)
        self._names = [(f"{name}_norm", name) for name in layers]
        if type(self).forward is DecoderBlock.forward:  # another may read what the mixer returns
            for (_, writer), (reader, _) in pairwise(self._names):
                sum_later(ctx.child(reader), self._layer(writer), self._layer(reader))

    def _layer(self, name: str) -> PluggableLayer:
        return cast(PluggableLayer, getattr(self, name))

    def return_partial_sums(self) -> bool:
        return self._layer(self._names[-1][1]).return_partial_sums()

    @property
    def takes_partial_sums(self) -> bool:
        return self._layer("mixer_norm").takes_partial_sums

    def take_partial_sums(self, ctx: Context) -> None:
        self._layer("mixer_norm").take_partial_sums(ctx.child("mixer_norm"))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, hidden] -> x, residual. The first block gets no residual; the sum of both is the stream."""
        for norm, layer in self._names:
            x, residual = self._layer(norm)(x, residual)
            x = self._layer(layer)(x, step)
        return x, cast(torch.Tensor, residual)
