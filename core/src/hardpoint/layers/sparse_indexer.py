"""The indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556): which positions each query of a layer reads.

It has a cache of its own, an index key for each token. Keys are in the dtype of ``--kv-cache-dtype``; those of 8 bits
have scales. Every rank of a group has all heads and makes the same lists.

Axes: T tokens, H index heads, D index head size, K positions of a list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import layer_norm

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.ops.index_scores import index_scores
from hardpoint.ops.multiply_heads import multiply_heads
from hardpoint.ops.rope_table import rope_table
from hardpoint.ops.rotary_embedding import rotary_embedding
from hardpoint.ops.store_index_keys import index_key_spec, store_index_keys
from hardpoint.ops.topk_positions import topk_positions
from hardpoint_plugin_api import (
    AttentionBatch,
    CacheLayout,
    CacheUser,
    CaptureGrade,
    ForwardStep,
    LinearArgs,
    PlainLayout,
    ScaledLayout,
    SparseIndexerArgs,
    StepPlanner,
    WeightSlot,
)
from hardpoint_plugin_api.elements import BUILT_IN

_MOST_SCORES = 1 << 24
"""Scores that exist at a time: they grow with tokens times positions."""


class IndexPlanner(StepPlanner):
    """Steps need no plan: the ops find lengths and pages in the batch's own arrays."""

    capture = CaptureGrade.ANY
    exact_lengths = False


class SparseIndexer(PluggableLayer, name="sparse_indexer"):
    """Slots: key_norm and key_norm_bias [D], head_weights float32 [H, hidden]. ``q`` makes index queries of the
    attention's compressed ones, ``k`` index keys of hidden states."""

    def __init__(self, ctx: Context, args: SparseIndexerArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype, self._device = args, dtype_name(ctx.dtype), ctx.torch_device
        self._num_positions, self._shared = ctx.max_model_len, ctx.shared
        self.q = Linear(ctx.child("q"), LinearArgs(args.query_rank, (("q", args.num_heads * args.head_size),)))
        self.k = Linear(ctx.child("k"), LinearArgs(args.hidden_size, (("k", args.head_size),)))
        self._spec = index_key_spec(args.head_size, ctx.kv_dtype)
        self._scaled = ctx.kv_dtype in BUILT_IN
        layout: CacheLayout = ScaledLayout() if self._scaled else PlainLayout()
        self.index = ctx.cache_users.add(CacheUser(ctx.path, self._spec, layout, IndexPlanner(), IndexPlanner))
        turns = {"interleaved": args.rope.interleaved}
        self._rotary_embedding = rotary_embedding.bind(ctx, head_size=args.head_size, scalars=turns)
        use: dict[str, Any] = {"layout": layout.name, "head_size": args.head_size}
        self._store = store_index_keys.bind(ctx, **use)
        self._score = self.scores(ctx, layout.name)
        self._multiply = multiply_heads.bind(ctx)
        self._weigh = multiply_heads.bind(ctx, dtype="float32")
        self._top_k = min(args.top_k, ctx.max_model_len)
        self._choose = topk_positions.bind(ctx, dtype="float32", scalars={"top_k": self._top_k})
        self._cos_sin: torch.Tensor | None = None
        self._hadamard: torch.Tensor | None = None

    def scores(self, ctx: Context, layout: str) -> Callable[..., torch.Tensor]:
        """A function with the arguments and the result of the op ``index_scores``, over a cache in ``layout``.

        Called once, at construction: a replacement with scores of its own overrides it.
        """
        return index_scores.bind(ctx, layout=layout, head_size=self.args.head_size)

    def declare(self) -> dict[str, WeightSlot]:
        size = (self.args.head_size,)
        return {
            "key_norm": WeightSlot(size, self.dtype),
            "key_norm_bias": WeightSlot(size, self.dtype),
            "head_weights": WeightSlot((self.args.num_heads, self.args.hidden_size), "float32"),
        }

    def bind(self) -> None:
        rope, args = replace(self.args.rope, interleaved=True), self.args  # the table is the same for either kind
        self._cos_sin = self._shared(rope, lambda: rope_table(rope, self._num_positions, self._device))
        if self._scaled and args.head_size & (args.head_size - 1) == 0:
            key = ("hadamard", args.head_size, self.weights["key_norm"].dtype)
            self._hadamard = self._shared(key, lambda: hadamard(args.head_size).to(self.weights["key_norm"]))

    def forward(self, x: torch.Tensor, compressed: torch.Tensor, step: ForwardStep, lists: torch.Tensor) -> None:
        """Write a list for each query to ``lists`` int32 [T, K], as LatentCall has them, and index keys to the cache.

        x: hidden states [T, hidden]; ``compressed``: the attention's compressed queries [T, query_rank]. K is the
        ``top_k`` of the arguments, or the most tokens of a request where these are fewer.
        """
        assert self._cos_sin is not None, "bind comes before forward"
        args = self.args
        q = self.q(compressed, step).view(x.shape[0], args.num_heads, args.head_size)
        key_norm = self.weights["key_norm"], self.weights["key_norm_bias"]
        k = layer_norm(self.k(x, step), (args.head_size,), *key_norm, args.norm_eps).unsqueeze(1)
        q, k = self._rotary_embedding(q, k, step.rotary_positions, self._cos_sin, interleaved=args.rope.interleaved)
        if self._hadamard is not None:  # spreads what is large in a few elements, and leaves products as they are
            q, k = (self._multiply(x.flatten(0, 1).unsqueeze(1), self._hadamard[None]).view(x.shape) for x in (q, k))
        self._store(k.squeeze(1), step.caches[self.index], step.metadata[self.index].batch.slot_mapping)
        factor = (args.num_heads * args.head_size) ** -0.5
        head_weights = self.weights["head_weights"]
        weights = self._weigh(x.to(head_weights.dtype).unsqueeze(1), head_weights.T[None]).squeeze(1) * factor
        step.interrupt(
            self.index,
            lambda cache, plan, q, weights, positions, lists: self._list(
                q, weights, cache, plan.batch, positions, lists
            ),
            *(q, weights, step.positions, lists),
        )

    def _list(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: dict[str, torch.Tensor],
        batch: AttentionBatch,
        positions: torch.Tensor,
        lists: torch.Tensor,
    ) -> None:
        """Write ``lists``, for as many tokens at a time as have few scores."""
        places = batch.block_table.shape[1] * cache["index_key"].shape[1]
        few = max(1, _MOST_SCORES // max(1, places))
        for first in range(0, q.shape[0], few):
            rows, starts = slice(first, first + few), batch.query_start
            scores = self._score(
                *(q[rows], weights[rows], cache, batch.block_table, starts - first if first else starts),
                positions[rows],
            )
            lists[rows] = self._choose(scores, positions[rows], top_k=self._top_k)


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal matrix [size, size] of Hadamard and Sylvester, float32. ``size`` is a power of 2."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix *= size**-0.5
    return matrix
