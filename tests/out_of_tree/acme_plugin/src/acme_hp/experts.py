"""Acme's experts: matrices stored column by column, one expert after the other, and an exchange of its own."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn.functional import silu

from hardpoint_plugin_api import (
    All2All,
    All2AllWorkload,
    BuildContext,
    DeviceInfo,
    Dispatched,
    DispatchHandle,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    Reason,
)

_MOST_EXPERTS = 64


class AcmeExperts(ExpertsKernel):
    """Leaves weighting and summing to core. Takes biases, and gpt-oss's gate beside the usual one."""

    layout = "acme_columns"
    reduces = False
    capturable = False

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse more experts than the card has queues for."""
        if (workload.num_experts or 0) <= _MOST_EXPERTS:
            return []
        return [
            Reason("experts", "too many experts", wanted=str(workload.num_experts), supported=f"up to {_MOST_EXPERTS}")
        ]

    def workspace_bytes(self, rows: int) -> int:
        """For what one expert makes of all tokens."""
        assert self.workload.intermediate_size is not None
        return rows * 2 * self.workload.intermediate_size * self.ctx.dtype.itemsize

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: w if n.endswith(".bias") else w.transpose(1, 2).contiguous() for n, w in weights.items()}

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weights[f"{name}.weight"].transpose(1, 2) for name in ("w13", "w2")}

    def apply(self, call: ExpertsCall) -> None:
        x, w13, w2 = call.x, call.w["w13.weight"], call.w["w2.weight"]
        for expert in range(w2.shape[0]):
            tokens, places = (call.ids == expert).nonzero(as_tuple=True)
            if tokens.numel():
                both = call.workspace.view(x.dtype)[: tokens.numel() * w13.shape[2]].view(-1, w13.shape[2])
                torch.mm(x[tokens], w13[expert], out=both)
                if "w13.bias" in call.w:
                    both += call.w["w13.bias"][expert]
                y = self._middle(*both.chunk(2, dim=-1)) @ w2[expert]
                call.out[tokens, places] = y + call.w["w2.bias"][expert] if "w2.bias" in call.w else y

    def _middle(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.workload.activation == "silu_and_mul":
            return silu(gate) * up
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


class AcmeExchange(All2All):
    """Shows every token to every rank, and has each rank add up what the others send back of its own."""

    capturable = False

    def __init__(self, ctx: BuildContext, workload: All2AllWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.num_experts is not None
        self._group = ctx.parallel.ep
        self._own = workload.num_experts // self._group.size

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        rows = self._group.all_gather(torch.tensor([x.shape[0]], device=x.device)).tolist()
        local = self._group.all_gather(ids, rows) - self._group.rank * self._own
        return Dispatched(
            self._group.all_gather(x, rows),
            None if scales is None else self._group.all_gather(scales, rows),
            local.masked_fill((local < 0) | (local >= self._own), -1),
            self._group.all_gather(weights, rows),
            None,
            DispatchHandle(rows),
        )

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        rows = cast(DispatchHandle[list[int]], handle).take()
        mine = [out.shape[0]] * self._group.size
        out.copy_(self._group.all_to_all(y, rows, mine).view(self._group.size, *out.shape).sum(0))
