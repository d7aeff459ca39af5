"""Token embedding and output head; a group of ranks divides the vocabulary.

Tied, they share one weight: the head holds it, packed as its kernel likes.
"""

from __future__ import annotations

from typing import Literal

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.ops.embedding_lookup import embedding_lookup
from hardpoint.parallel.shards import vocab_shard
from hardpoint_plugin_api import EmbeddingArgs, ForwardStep, LinearArgs, WeightSlot


class LMHead(PluggableLayer, name="lm_head"):
    """Hidden states [N, hidden] to logits [N, vocab]."""

    def __init__(self, ctx: Context, args: EmbeddingArgs) -> None:
        super().__init__(ctx)
        rows = (("vocab", args.vocab_size),)
        kind: Literal["embedding", "lm_head"] = "embedding" if args.tied else "lm_head"
        self.shard, self._group, self._vocab_size = (
            vocab_shard(args.vocab_size, ctx.parallel.tp),
            ctx.parallel.tp,
            args.vocab_size,
        )
        shards = (self.shard,) if self.shard else ()
        self.linear = Linear(ctx.child("linear"), LinearArgs(args.hidden_size, rows, kind=kind, row_shards=shards))
        self._step = ForwardStep.empty(ctx.torch_device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        logits: torch.Tensor = self.linear(hidden, self._step)
        if self.shard is None:
            return logits
        return self._group.all_gather_columns(logits)[:, : self._vocab_size]


class Embedding(PluggableLayer, name="embedding"):
    """Token ids [T] to vectors [T, hidden]. Slot: weight, unless ``tied_to`` a head that holds it."""

    def __init__(self, ctx: Context, args: EmbeddingArgs, tied_to: LMHead | None = None) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        self._tied_to: tuple[LMHead, ...] = (tied_to,) if tied_to else ()  # a tuple keeps it from being a sub-layer
        self._lookup = None if tied_to else embedding_lookup.bind(ctx)
        self._group = ctx.parallel.tp
        self._shard = getattr(tied_to, "shard", None) if tied_to else vocab_shard(args.vocab_size, ctx.parallel.tp)
        if not tied_to:
            ctx.quantization.embedding(ctx.path, args.vocab_size, args.hidden_size, self.dtype, self._shard)

    def declare(self) -> dict[str, WeightSlot]:
        if self._tied_to:
            return {}
        rows = self._shard.size if self._shard else self.args.vocab_size
        shards = (self._shard,) if self._shard else ()
        return {"weight": WeightSlot((rows, self.args.hidden_size), self.dtype, 0, shards=shards)}

    def allocate(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(ids.shape[0], self.args.hidden_size, dtype=getattr(torch, self.dtype), device=ids.device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]."""
        if self._shard is None:
            return self._rows(ids)
        local = ids - self._group.rank * self._shard.size
        row = local.clamp(0, self._shard.size - 1)
        return self._group.all_reduce(self._rows(row) * (row == local)[:, None])

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self._lookup is not None:
            return self._lookup(ids, self.weights["weight"])
        (head,) = self._tied_to
        return head.linear.rows(ids)
