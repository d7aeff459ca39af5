"""The steps around an experts kernel: quantize and dispatch before it, reduce and combine after it.

Axes: T tokens, R rows received, K experts per token, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.numerics import quantize_rows
from hardpoint.ops.moe_unpermute import moe_unpermute
from hardpoint_plugin_api import (
    All2All,
    BatchedExpertsCall,
    BatchedExpertsKernel,
    Dispatched,
    ExpertsCall,
    ExpertsKernel,
    PluginLoadError,
)

if TYPE_CHECKING:
    from hardpoint.context import Context

AnyExpertsKernel = ExpertsKernel | BatchedExpertsKernel


class PrepareFinalize:
    """Joins one kernel with one all2all, whose format it has."""

    def __init__(self, ctx: Context, all2all: All2All, kernel: AnyExpertsKernel) -> None:
        self._all2all, self._kernel, self._dtype = all2all, kernel, ctx.dtype
        self._reduces = isinstance(kernel, BatchedExpertsKernel) or kernel.reduces
        self._unpermute = None if self._reduces else moe_unpermute.bind(ctx)
        wanted = kernel.input_spec
        if wanted is not None and (wanted.static or wanted.scales[0].block[0] != 1):
            raise PluginLoadError(
                f"experts kernel {type(kernel).__name__} wants its input as {wanted}; input that is shared by all "
                "experts has no scales in a checkpoint, and tokens travel one by one: its input_spec must be dynamic, "
                "with scales for each token"
            )

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w: dict[str, torch.Tensor],
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, K], weights float32 [T, K] -> [T, H], through the kernel with weights ``w``."""
        out = torch.empty(x.shape, dtype=self._dtype, device=x.device)
        sent, is_own = self._prepare(x, ids, weights)
        if isinstance(self._kernel, BatchedExpertsKernel):
            assert sent.counts is not None
            y = torch.empty(sent.x.shape, dtype=self._dtype, device=x.device)
            self._kernel.apply(BatchedExpertsCall(sent.x, sent.counts, w, y, workspace, sent.scales))
        else:
            assert sent.ids is not None
            assert sent.weights is not None
            shape = sent.x.shape if self._reduces else (*sent.ids.shape, sent.x.shape[1])
            y = out if is_own and self._reduces else torch.empty(shape, dtype=self._dtype, device=x.device)
            self._kernel.apply(ExpertsCall(sent.x, sent.ids, sent.weights, w, y, workspace, sent.scales))
            y = y if self._reduces else self._reduce(y, sent.ids, sent.weights)
        self._all2all.combine(y, sent.handle, out)
        return out

    def _prepare(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Dispatched, bool]:
        """Quantize as the kernel wishes, and dispatch. Says, too, whether what came is this rank's own, unmoved."""
        scales = None
        if self._kernel.input_spec is not None:
            rounded = quantize_rows(x, self._kernel.input_spec, {})
            x, scales = rounded.codes, rounded.scale
        sent = self._all2all.dispatch(x, scales, ids, weights)
        return sent, sent.x is x

    def _reduce(self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """y [R, K, H] -> [R, H]."""
        assert self._unpermute is not None
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        return self._unpermute(y.flatten(0, 1), places.masked_fill(ids < 0, -1), weights)
