"""Linear attention with a decay for each head: a mixer whose cache is one state of each sequence.

Correct, without a claim to speed: prompts are read token by token, so that it does not matter where steps
are cut.
Axes: T tokens, N requests, H heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.layers.states import StateMetadata, add_states
from hardpoint.parallel.shards import HeadShards
from hardpoint_plugin_api import ForwardStep, LinearArgs, LinearAttentionArgs, Plane, Quantized


class LinearAttention(PluggableLayer, name="linear_attention"):
    """See LinearAttentionArgs. The cache holds a state of each sequence, float32 [H, D, D], keys along axis 1."""

    def __init__(self, ctx: Context, args: LinearAttentionArgs) -> None:
        super().__init__(ctx)
        self.args, width = args, args.num_heads * args.head_size
        self._group, self._returns_partial_sums = ctx.parallel.tp, False
        self._heads = heads = HeadShards.of(args.num_heads, args.num_heads, ctx.parallel.tp)
        self.qkv = Linear(
            ctx.child("qkv"),
            LinearArgs(
                args.hidden_size,
                (("q", width), ("k", width), ("v", width)),
                row_shards=heads.rows(args.head_size),
            ),
        )
        self.input_spec = self.qkv.input_spec
        self.out = Linear(
            ctx.child("out"),
            LinearArgs(width, (("out", args.hidden_size),), column_shard=heads.columns(args.head_size)),
        )
        self._device = ctx.torch_device
        shape = (heads.num_heads, args.head_size, args.head_size)
        self.index = add_states(ctx, Plane("state", shape, "float32"))

    def bind(self) -> None:
        decays = torch.tensor(self.args.decays, dtype=torch.float32, device=self._device)
        self._decays = decays[self._heads.own, None, None]

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = True
        return True

    def forward(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Advances the states of the step's requests."""
        qkv = self.qkv(x, step).view(x.shape[0], 3, self._heads.num_heads, self.args.head_size)
        mixed = torch.empty_like(qkv[:, 0])
        step.interrupt(
            self.index, lambda cache, plan, qkv, out: self._advance(qkv, cache["state"], plan, out), qkv, mixed
        )
        y: torch.Tensor = self.out(mixed.view(x.shape[0], -1), step)
        return y if self._returns_partial_sums else self._group.all_reduce(y)

    def _advance(self, qkv: torch.Tensor, states: torch.Tensor, plan: StateMetadata, out: torch.Tensor) -> None:
        """Write the results of queries, keys and values [T, 3, H, D] to ``out`` [T, H, D]; mutates ``states``."""
        current = plan.begin(states)
        for part in plan.parts:
            given, old = qkv[part.rows].float(), current[part.states]
            is_new = part.seq_lens == part.query_start.diff()
            old = old.masked_fill(is_new[:, None, None, None], 0.0)
            if part.starts is None:
                result, current[part.states] = self._token(given, old)
                out[part.rows] = result.to(out.dtype)
            else:
                mixed = torch.empty_like(given[:, 0])
                for number, (first, last) in enumerate(pairwise(part.starts)):
                    state = old[number : number + 1]
                    for token in range(first, last):
                        mixed[token : token + 1], state = self._token(given[token : token + 1], state)
                    current[part.states[number]] = state[0]
                out[part.rows] = mixed.to(out.dtype)
            plan.keep(states, current, part)

    def _token(self, qkv: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result [N, H, D] and the next state [N, H, D, D] of one token of each request; qkv [N, 3, H, D]."""
        q, k, v = qkv.unbind(1)
        state = self._decays * state + k.unsqueeze(-1) * v.unsqueeze(-2)
        return self.args.scale * (q.unsqueeze(-1) * state).sum(-2), state
