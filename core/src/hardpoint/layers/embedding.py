"""Token embedding and output head. Tied, they share one weight: the head holds it, packed as its kernel likes."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint_plugin_api import EmbeddingArgs, LinearArgs, WeightSlot


class LMHead(PluggableLayer, name="lm_head"):
    """Hidden states [N, hidden] to logits [N, vocab]."""

    def __init__(self, ctx: Context, args: EmbeddingArgs) -> None:
        super().__init__(ctx)
        self.linear = Linear(ctx.child("linear"), LinearArgs(args.hidden_size, (("vocab", args.vocab_size),)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        logits: torch.Tensor = self.linear(hidden)
        return logits


class Embedding(PluggableLayer, name="embedding"):
    """Token ids [T] to vectors [T, hidden]. Slot: weight, unless ``tied_to`` a head that holds it."""

    def __init__(self, ctx: Context, args: EmbeddingArgs, tied_to: LMHead | None = None) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        self._tied_to = (tied_to,) if tied_to else ()  # a tuple keeps it from being a sub-layer

    def declare(self) -> dict[str, WeightSlot]:
        if self._tied_to:
            return {}
        return {"weight": WeightSlot((self.args.vocab_size, self.args.hidden_size), self.dtype, 0)}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]."""
        return self._tied_to[0].linear.rows(ids) if self._tied_to else self.weights["weight"][ids]
