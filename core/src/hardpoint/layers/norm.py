"""Root-mean-square norms: of a residual stream, and of heads that ranks divide."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.ops.add_rms_norm import add_rms_norm, add_rms_norm_quantized
from hardpoint.ops.allreduce_add_rms_norm import allreduce_add_rms_norm
from hardpoint.ops.rms_norm import rms_norm, rms_norm_quantized
from hardpoint_plugin_api import NormArgs, Quantized, ShardPlan, WeightSlot


class Norm(PluggableLayer, name="norm"):
    """Adds what the last sub-layer made to the residual and norms the sum. Slot: weight."""

    def __init__(self, ctx: Context, args: NormArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        spec, self._scalars = args.spec, {"eps": args.eps}
        if spec is None:
            self._rms_norm = rms_norm.bind(ctx, scalars=self._scalars)
            self._add_rms_norm = add_rms_norm.bind(ctx, scalars=self._scalars)
        else:
            self._rms_norm_quantized = rms_norm_quantized.bind(ctx, spec=spec, scalars=self._scalars)
            self._add_rms_norm_quantized = add_rms_norm_quantized.bind(ctx, spec=spec, scalars=self._scalars)

    def declare(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot((self.args.size,), self.dtype)}

    @property
    def takes_partial_sums(self) -> bool:
        """False where the output is quantized, too: no kernel sums over ranks, norms and quantizes."""
        return self.args.spec is None

    def take_partial_sums(self, ctx: Context) -> None:
        self._add_rms_norm = allreduce_add_rms_norm.bind(ctx, hidden_size=self.args.size, scalars=self._scalars)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
        """x, residual [T, n] -> norm(x + residual), x + residual. Without a residual, x is it.

        May write to ``residual``, and to ``x`` where that is a partial sum. The norm is in the form of the arguments'
        ``spec``.
        """
        weight, eps, spec = self.weights["weight"], self.args.eps, self.args.spec
        if spec is None:
            if residual is None:
                return self._rms_norm(x, weight, eps=eps), x
            return self._add_rms_norm(x, residual, weight, eps=eps)
        if residual is None:
            return Quantized(*self._rms_norm_quantized(x, weight, eps=eps, spec=spec), spec), x
        data, scale, total = self._add_rms_norm_quantized(x, residual, weight, eps=eps, spec=spec)
        return Quantized(data, scale, spec), total


class ResidualSum(PluggableLayer):
    """Adds what the last sub-layer made to the residual, as Norm does, and norms nothing."""

    traceable = True

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, n] -> x + residual, twice. Without a residual, x is it."""
        total = x if residual is None else x + residual
        return total, total


class NormAcrossHeads:
    """The norm of each token's elements of all heads of the model, of which this rank has equally many as others.

    Ranks sum their squares. Where results must not depend on the other tokens, which torch's sums may, each gathers the
    heads of all ranks instead, and norms them by the selected op.
    """

    def __init__(self, ctx: Context, eps: float) -> None:
        self._eps, self._group, self._gathers = eps, ctx.parallel.tp, ctx.config.batch_invariant
        self._rms_norm = rms_norm.bind(ctx, scalars={"eps": eps})

    @staticmethod
    def slot(size: int, dtype: str, shard: ShardPlan | None) -> WeightSlot:
        """The slot of its weight, of ``size`` elements on this rank."""
        return WeightSlot((size,), dtype, None if shard is None else 0, shards=() if shard is None else (shard,))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head size], weight [heads * head size] -> like x. Heads that several ranks have count once."""
        flat = x.flatten(1)
        if self._group.size == 1:
            return self._rms_norm(flat, weight, eps=self._eps).view(x.shape)
        if self._gathers:
            return (weight * self._gathered(flat)).view(x.shape)
        wide = flat.to(torch.promote_types(x.dtype, torch.float32))
        mean = self._group.all_reduce(wide.square().mean(-1, keepdim=True)) / self._group.size
        return (weight * (wide * torch.rsqrt(mean + self._eps)).to(x.dtype)).view(x.shape)

    def _gathered(self, flat: torch.Tensor) -> torch.Tensor:
        """flat [T, n], this rank's elements -> like it, normed with those of all ranks."""
        rows = self._group.all_gather_columns(flat.contiguous())
        whole: torch.Tensor = self._rms_norm(rows, rows.new_ones(rows.shape[1]), eps=self._eps)
        return whole.chunk(self._group.size, dim=1)[self._group.rank]
