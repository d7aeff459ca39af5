"""The matrix of latent attention that makes keys and values of latents, as either form of attention wants it.

Axes: T tokens, H query heads on this rank, L latent size, R rope size, N size of a key without it, V value size.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer, checked_weights
from hardpoint.ops.base import by_tokens
from hardpoint.ops.multiply_heads import multiply_heads
from hardpoint.parallel.shards import HeadShards, widened
from hardpoint.plugin_host.blame import blame, construct
from hardpoint.quantization.merging import collapse_parts
from hardpoint_plugin_api import (
    LinearArgs,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    MLAArgs,
    Scheme,
    WeightSlot,
    dequantize,
    weight_slots,
)


class KeyValueUp(PluggableLayer):
    """The matrix that makes keys and values of latents, [heads * (N + V), L] in a checkpoint.

    Its slots are those of the scheme that the context's quantization gives it. From ``prepare`` on there are plain
    ``keys`` [H, N, L] and ``values`` [H, L, V] in the activations' dtype, for the absorbed form. ``unabsorbed``: the
    whole matrix is there, too, as a linear kernel lays it out.
    """

    def __init__(self, ctx: Context, args: MLAArgs, heads: HeadShards, *, unabsorbed: bool) -> None:
        super().__init__(ctx)
        self.args, self._num_heads, self._dtype = args, heads.num_heads, ctx.dtype
        size = args.nope_size + args.value_size
        self._linear = LinearArgs(
            args.latent_size,
            (("kv", args.num_heads * size),),
            row_shards=(widened(heads.query, size),) if heads.query else (),
        )
        scheme = ctx.quantization.linear(ctx.path, self._linear, dtype_name(ctx.dtype))
        assert scheme is not None, "a matrix of one part has one scheme"
        self.scheme = scheme
        self._multiply = multiply_heads.bind(ctx)
        self._product = PlainProduct(ctx, args.latent_size, heads.num_heads * size) if unabsorbed else None

    def declare(self) -> dict[str, WeightSlot]:
        linear = self._linear
        slots = weight_slots(self.scheme, linear.own_parts, linear.own_in_features)
        if not self.scheme.stored and linear.row_shards:
            slots["weight"] = replace(slots["weight"], shard_axis=0, shards=linear.row_shards)
        return slots

    def prepare(self) -> None:
        args, weights = self.args, collapse_parts(self.weights, self.path)
        matrix = dequantize(weights, self.scheme.weight, self._dtype).view(-1, args.latent_size)
        whole = matrix.view(self._num_heads, -1, args.latent_size)
        keys, values = whole.split([args.nope_size, args.value_size], dim=1)
        self.weights = {"values": values.transpose(1, 2).contiguous()}
        if self._product is not None:
            packed = self._product.prepack(matrix.contiguous())
            self.weights |= {f"whole.{name}": x for name, x in packed.items()}
        memory = {x.untyped_storage().data_ptr() for x in self.weights.values()}
        # Where the matrix is kept as it is, the keys' rows are a part of it.
        self.weights["keys"] = keys if keys.untyped_storage().data_ptr() in memory else keys.contiguous()

    def into_queries(self, q_nope: torch.Tensor) -> torch.Tensor:
        """Queries of heads, [T, H, N], as queries of latents, [T, H, L]."""
        return self._multiply(q_nope, self.weights["keys"])

    def onto_results(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of latents, [T, H, L], as sums of values, [T, H, V]."""
        return self._multiply(attended, self.weights["values"])

    def keys_values(self, latent: torch.Tensor, rope_key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [T, H, N + R] and values [T, H, V] of latents [T, L] and rotated keys [T, R]."""
        assert self._product is not None, "a layer of the absorbed form alone"
        packed = {name.removeprefix("whole."): x for name, x in self.weights.items() if name.startswith("whole.")}
        both = self._product(latent, packed).view(latent.shape[0], self._num_heads, -1)
        nope, values = both.split([self.args.nope_size, self.args.value_size], dim=-1)
        return torch.cat([nope, rope_key.unsqueeze(1).expand(-1, self._num_heads, -1)], dim=-1), values


class PlainProduct:
    """A product with a matrix [out, in] in the activations' dtype that no slot holds, by the kernel selected for it."""

    def __init__(self, ctx: Context, in_features: int, out_features: int) -> None:
        dtype = dtype_name(ctx.dtype)
        pair = Scheme.plain(dtype).pair
        plan = ctx.select(LinearWorkload(dtype=dtype, in_features=in_features, out_features=out_features, spec=pair))
        kernels = [construct(e.offer, ctx.load(e.offer), LinearKernel, ctx, plan.workload) for e in plan.entries]
        limits = [e.range.max for e in plan.entries]
        self._offer, self._first = plan.entries[0].offer, kernels[0]
        self._apply = by_tokens(limits, [k.apply for k in kernels], lambda call: call.x.shape[0])

    def prepack(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """``matrix`` as the kernels lay it out. It may be a part of the result."""
        with blame(self._offer):
            packed = self._first.prepack({"weight": matrix})
        return checked_weights(self._offer, packed)

    def __call__(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """[T, in] -> [T, out]; ``weights`` as prepack returned them."""
        return self._apply(LinearCall(x, weights, None))
