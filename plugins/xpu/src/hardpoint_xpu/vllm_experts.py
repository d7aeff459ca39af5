"""Experts by the grouped matrix product of vllm-xpu-kernels: rows sorted by expert, two products, a weighted sum.

Axes: T tokens, K experts of a token, P = T * K pairs, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hardpoint.experts.middle import bound_middle, is_gated
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    Reason,
    dequantize,
)
from hardpoint_plugin_api.experts import MATRICES, expert_matrix
from hardpoint_xpu.vllm_library import operator, reasons_against

if TYPE_CHECKING:
    from hardpoint.context import Context

_TILE = 128
_TOP_K = (1, 2, 4, 6, 7, 8, 10, 16)
_MOST_EXPERTS = 1024
_OPERATORS = ("_moe_C.remap_hidden_states", "_xpu_C.cutlass_grouped_gemm_interface", "_moe_C.moe_gather")


class XpuGroupedExperts(ExpertsKernel):
    """Weights of 16 bits, or 8-bit floats with scales of tiles of 128 x 128; activations as they are."""

    layout = "xpu_grouped"

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.activation is not None
        assert workload.num_experts is not None
        self._middle = bound_middle(cast("Context", ctx), workload.activation)
        self._experts = workload.num_experts

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse sizes that the operators do, and a library that has others."""
        found = list(_size_reasons(workload))
        if workload.top_k is not None and workload.top_k not in _TOP_K:
            supported = ", ".join(map(str, _TOP_K))
            found.append(Reason("top-k", "experts of a token", wanted=str(workload.top_k), supported=supported))
        if workload.num_experts is not None and workload.num_experts > _MOST_EXPERTS:
            wanted, supported = str(workload.num_experts), f"up to {_MOST_EXPERTS}"
            found.append(Reason("num-experts", "too many experts", wanted=wanted, supported=supported))
        return [*found, *reasons_against(*_OPERATORS)]

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``MATRIX.weight`` and its scales, of tiles, with columns before rows: [E, H, 2I] and [E, I, H]."""
        return {
            key: value.transpose(1, 2).contiguous() if not key.endswith(".bias") else value
            for key, value in weights.items()
        }

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = {k: v if k.endswith(".bias") else v.transpose(1, 2) for k, v in weights.items()}
        spec = self.workload.spec
        if spec is None or spec[0].is_plain:
            return {name: plain[f"{name}.weight"].contiguous() for name in MATRICES}
        return {
            name: torch.stack(
                [dequantize(expert_matrix(plain, name, e), spec[0], self.ctx.dtype) for e in range(self._experts)]
            )
            for name in MATRICES
        }

    def apply(self, call: ExpertsCall) -> None:
        tokens, top_k = call.ids.shape
        if not tokens:
            return
        x = call.x.contiguous()
        rows = x.new_empty(tokens * top_k, x.shape[1])
        counts = torch.zeros(self._experts, dtype=torch.int32, device=x.device)
        places = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
        operator("_moe_C.remap_hidden_states")(
            hidden_states=x,
            hidden_states_scales=None,
            remapped_hidden_states=rows,
            remapped_hidden_states_scales=None,
            expert_map=None,
            rows_per_expert=counts,
            unpermuted_row_to_permuted_row=places,
            topk_ids=call.ids.contiguous(),
            total_experts_num=self._experts,
            local_experts_num=self._experts,
        )
        results = self._product("w2", self._middle(self._product("w13", rows, call.w, counts)), call.w, counts)
        operator("_moe_C.moe_gather")(
            output=call.out,
            moe_output=results,
            topk_weights=call.weights.contiguous(),
            unpermuted_row_to_permuted_row=places,
            num_experts=self._experts,
        )

    def _product(self, name: str, x: torch.Tensor, w: dict[str, torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
        weight = w[f"{name}.weight"]
        _, columns, rows = weight.shape
        y = x.new_empty(x.shape[0], rows)
        operator("_xpu_C.cutlass_grouped_gemm_interface")(
            ptr_A=x.contiguous(),
            ptr_A_scale=None,
            ptr_B=weight,
            ptr_B_scale=w.get(f"{name}.weight_scale"),
            ptr_bias=w.get(f"{name}.bias"),
            ptr_D=y,
            rows_per_expert=counts,
            N=rows,
            K=columns,
            num_experts=self._experts,
        )
        return y


def _size_reasons(workload: ExpertsWorkload) -> list[Reason]:
    hidden, width = workload.hidden_size, workload.intermediate_size
    if not hidden or not width or workload.activation is None:
        return []
    tiled = workload.spec is not None and not workload.spec[0].is_plain
    rows = width * (2 if is_gated(workload.activation) else 1)
    sizes = {"hidden-size": hidden, "intermediate-size": width, "w13": rows}
    of = _TILE if tiled else 8
    return [
        Reason(code, "grouped products take whole blocks", wanted=str(size), supported=f"multiples of {of}")
        for code, size in sizes.items()
        if size % of
    ]
