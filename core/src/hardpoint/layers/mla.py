"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one cached latent per token, shared by all heads.

Keys and values of every head are products of the latent with a matrix. In the absorbed form the layer does not make
them. It multiplies the keys' matrix into the queries, attends to the latents, and multiplies the values' matrix onto
the result. Decodes take this form. Prompts take the unabsorbed form where that costs fewer multiplications
(``latent_prompts.py``). There the layer makes keys and values of the step's tokens, and of cached tokens in chunks, and
merges the results. In sparse attention, an indexer chooses the positions that each query reads, and every token takes
the absorbed form.

Axes: T tokens, H query heads on this rank, L latent size, R rope size, N size of a head's other part, V value size. A
group of ranks divides the heads; each has every latent, and sums what all made.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from hardpoint.attention.build import latent_backend
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.key_value_up import KeyValueUp
from hardpoint.layers.latent_prompts import FormsMetadata, LatentForms, Prompts, UnabsorbedForms
from hardpoint.layers.linear import Linear
from hardpoint.layers.sparse_indexer import SparseIndexer
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.ops.rope_table import rope_table
from hardpoint.ops.rotary_embedding import rotary_embedding
from hardpoint.ops.varlen_attention import merge_attention, varlen_attention
from hardpoint.parallel.shards import HeadShards, widened
from hardpoint_plugin_api import (
    AttentionMetadata,
    ConfigError,
    ForwardStep,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
    LinearArgs,
    MLAArgs,
    Quantized,
    WeightSlot,
)


class MLA(PluggableLayer, name="mla"):
    """Slots: latent_norm [L], and q_norm [query_rank] where queries are compressed. ``down`` makes the latent and the
    shared key (parts ``q`` and ``kv`` where it makes compressed queries, too), ``q`` the queries; ``kv_up`` holds the
    matrices of keys and values."""

    forms: ClassVar[type[LatentForms] | None] = LatentForms
    """The planner that divides a step among the forms; None: the absorbed form serves all tokens."""

    def __init__(self, ctx: Context, args: MLAArgs) -> None:
        super().__init__(ctx)
        kind = self.forms if args.top_k is None else None
        self.args, self.dtype, self._device = args, dtype_name(ctx.dtype), ctx.torch_device
        self._num_positions, self._group, self._returns_partial_sums = ctx.max_model_len, ctx.parallel.tp, False
        heads = HeadShards.of(args.num_heads, args.num_heads, ctx.parallel.tp)
        self._num_heads, rank = heads.num_heads, args.query_rank
        compressed = (("q", rank),) if rank else ()
        self.down = Linear(
            ctx.child("down"),
            LinearArgs(args.hidden_size, (*compressed, ("kv", args.latent_size + args.rope_size)), args.bias),
        )
        size = args.nope_size + args.rope_size
        self.q = Linear(
            ctx.child("q"),
            LinearArgs(
                rank or args.hidden_size,
                (("q", args.num_heads * size),),
                row_shards=(widened(heads.query, size),) if heads.query else (),
            ),
        )
        self.kv_up = KeyValueUp(ctx.child("kv_up"), args, heads, unabsorbed=kind is not None)
        width = args.num_heads * args.value_size
        self.out = Linear(
            ctx.child("out"),
            LinearArgs(width, (("out", args.hidden_size),), args.bias, column_shard=heads.columns(args.value_size)),
        )
        if rank or self.down.input_spec == self.q.input_spec:  # whoever reads what the block's norm made
            self.input_spec = self.down.input_spec
        self.indexer = None if args.indexer is None else SparseIndexer(ctx.child("indexer"), args.indexer)
        if self.indexer is not None:
            self.input_spec = None  # the indexer reads hidden states as they are
        top_k = None if args.top_k is None else min(args.top_k, ctx.max_model_len)
        self._lists = None if top_k is None else IndexLists(ctx, top_k, chooses=self.indexer is not None)
        spec = LatentSpec(
            num_heads=heads.num_heads,
            latent_size=args.latent_size,
            rope_size=args.rope_size,
            scale=args.scale,
            dtype=self.dtype,
            kv_dtype=ctx.kv_dtype,
            block_size=ctx.block_size,
            top_k=top_k,
        )
        planner = kind and partial(
            kind,
            args=args,
            num_heads=heads.num_heads,
            most_tokens=ctx.limits.max_tokens,
            itemsize=ctx.dtype.itemsize,
        )
        self.index, self.backend = latent_backend(ctx, spec, planner)
        self._divided = planner is not None
        if planner is not None:
            self._attend_new, self._attend_cached = (
                varlen_attention.bind(ctx, scalars={"scale": args.scale, "causal": causal}, head_size=size)
                for causal in (True, False)
            )
            self._merge = merge_attention.bind(ctx)
        self._rms_norm = rms_norm.bind(ctx, scalars={"eps": args.norm_eps})
        if args.rope is not None:
            turns = {"interleaved": args.rope.interleaved}
            self._rotary_embedding = rotary_embedding.bind(ctx, head_size=args.rope_size, scalars=turns)
        self._shared = ctx.shared
        self._cos_sin: torch.Tensor | None = None

    def declare(self) -> dict[str, WeightSlot]:
        slots = {"latent_norm": WeightSlot((self.args.latent_size,), self.dtype)}
        if self.args.query_rank:
            slots["q_norm"] = WeightSlot((self.args.query_rank,), self.dtype)
        return slots

    def bind(self) -> None:
        if self.args.rope is not None:
            rope = replace(self.args.rope, interleaved=True)  # the table is the same for either kind of pairs
            self._cos_sin = self._shared(rope, lambda: rope_table(rope, self._num_positions, self._device))

    def _rotated(
        self, queries: torch.Tensor, key: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, R] and the key that all heads share [T, R], rotated where the layer rotates them."""
        if self.args.rope is None:
            return queries.contiguous(), key.contiguous()
        assert self._cos_sin is not None, "bind comes before forward"
        positions, interleaved = step.rotary_positions, self.args.rope.interleaved
        queries, keys = self._rotary_embedding(
            queries, key.unsqueeze(1), positions, self._cos_sin, interleaved=interleaved
        )
        return queries, keys.squeeze(1)

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = True
        return True

    def forward(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Writes this step's latents and rotated keys to the layer's cache."""
        args, eps = self.args, self.args.norm_eps
        down: torch.Tensor = self.down(x, step)
        lists, hidden = None if self._lists is None else self._lists.of_step(down.shape[0]), x
        latent, rope_key = down[:, -args.latent_size - args.rope_size :].split([args.latent_size, args.rope_size], -1)
        latent = self._rms_norm(latent, self.weights["latent_norm"], eps=eps)
        if args.query_rank:
            x = self._rms_norm(down[:, : args.query_rank], self.weights["q_norm"], eps=eps)
            if self.indexer is not None:
                self.indexer(hidden, x, step, lists)
        queries = self.q(x, step).view(down.shape[0], self._num_heads, -1)
        q_nope, q_rope = queries.split([args.nope_size, args.rope_size], dim=-1)
        q_rope, rope_key = self._rotated(q_rope, rope_key, step)
        slots = step.metadata[self.index].batch.slot_mapping
        self.backend.store(LatentStoreCall(latent, rope_key, step.caches[self.index], slots))
        if self._divided:
            values = q_nope.new_empty(down.shape[0], self._num_heads, args.value_size)
            step.interrupt(self.index, self._by_forms, q_nope, q_rope, latent, rope_key, values)
        else:
            q_latent = self.kv_up.into_queries(q_nope)
            attended, attend = torch.empty_like(q_latent), self.backend.forward
            step.interrupt(
                self.index,
                lambda cache, plan, q, q_rope, latent, key, out, lists=None: attend(
                    LatentCall(q, q_rope, latent, key, cache, plan, out, lists)
                ),
                *(q_latent, q_rope, latent, rope_key, attended),
                *(() if lists is None else (lists,)),
            )
            values = self.kv_up.onto_results(attended)
        y: torch.Tensor = self.out(values.reshape(down.shape[0], -1), step)
        return y if self._returns_partial_sums else self._group.all_reduce(y)

    def _by_forms(
        self,
        cache: dict[str, torch.Tensor],
        metadata: AttentionMetadata,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write the results of all heads, ``values`` [T, H, V]. ``metadata`` is LatentForms'."""
        assert isinstance(metadata, FormsMetadata)
        if metadata.absorbed is not None:
            rows = metadata.rows
            q_latent = self.kv_up.into_queries(q_nope[rows])
            attended = torch.empty_like(q_latent)
            self.backend.forward(
                LatentCall(q_latent, q_rope[rows], latent[rows], rope_key[rows], cache, metadata.absorbed, attended)
            )
            values[rows] = self.kv_up.onto_results(attended)
        for prompts in metadata.prompts:
            q = torch.cat([q_nope[prompts.rows], q_rope[prompts.rows]], dim=-1)
            values[prompts.rows] = self._unabsorbed(q, latent[prompts.rows], rope_key[prompts.rows], cache, prompts)

    def _unabsorbed(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        cache: dict[str, torch.Tensor],
        prompts: Prompts,
    ) -> torch.Tensor:
        """Results [T, H, V] of the queries of some requests, q [T, H, N + R], whose newest tokens are given."""
        new, scale = prompts.tokens, self.args.scale
        out, sums = self._attend_new(
            q,
            *self.kv_up.keys_values(latent, rope_key),
            new.start,
            new.start,
            query_starts=new.starts,
            key_starts=new.starts,
            scale=scale,
            causal=True,
        )
        for chunk in prompts.context:
            cached = chunk.read(self.backend.layout, cache, q.dtype)
            part = self._attend_cached(
                q[chunk.rows],
                *self.kv_up.keys_values(*cached),
                chunk.queries.start,
                chunk.keys.start,
                query_starts=chunk.queries.starts,
                key_starts=chunk.keys.starts,
                scale=scale,
                causal=False,
            )
            self._merge(out[chunk.rows], sums[chunk.rows], *part)
        return out


class AbsorbedMLA(MLA):
    """The absorbed form for all tokens. With ``batch_invariant`` functions, a token's result is its request's alone."""

    forms = None


class UnabsorbedMLA(MLA):
    """The unabsorbed form for every request with several queries whose length is known."""

    forms = UnabsorbedForms


class IndexLists:
    """The lists that the newest indexer has written: for its own layer, and for later layers that have none.

    Raises ConfigError where a layer without one (``chooses`` False) begins a pipeline stage.
    """

    def __init__(self, ctx: Context, top_k: int, *, chooses: bool) -> None:
        self._key, self._top_k, self._resources = f"index_lists_{top_k}", top_k, ctx.resources
        ctx.resources.declare(self._key, 4 * top_k * ctx.limits.max_tokens, scope="step")
        layers_that_choose = ctx.shared(self._key, list[str])
        if chooses:
            layers_that_choose.append(ctx.path)
        elif not layers_that_choose:
            raise ConfigError(
                f"{ctx.path}: reads the positions that an earlier layer's indexer chose, and that layer is in another "
                "pipeline stage; run with another --pipeline-parallel-size"
            )

    def of_step(self, tokens: int) -> torch.Tensor:
        """The lists of a step, int32 [T, K]."""
        memory = self._resources.get(self._key).view(torch.int32)
        return memory[: tokens * self._top_k].view(tokens, self._top_k)
