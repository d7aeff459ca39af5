"""The experts family's truth: one expert after the other, by its definition, for every pair of specs."""

from __future__ import annotations

import torch
from torch.nn import functional

from hardpoint.experts.middle import reference_middle
from hardpoint.numerics import fake_quantize
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    LinearWorkload,
    QuantSpec,
    Reason,
    dequantize,
    expert_matrix,
)


class ReferenceExperts(ExpertsKernel):
    """Weights in the plain layout, one expert's dequantized at a time; activations quantized and back where asked for.

    Results are summed in float32 or wider, by ascending number of the expert, and rounded once. The host waits for the
    device to learn which experts have tokens, so that it can be in no graph.
    """

    capturable = False

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.activation is not None
        self._middle = reference_middle(workload.activation)

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse specs that the emulated matmul refuses."""
        specs = (workload.spec, *([workload.w2_spec] if workload.w2_spec is not None else ()))
        linear = [LinearWorkload(spec=spec, features=workload.features) for spec in specs]
        return [reason for each in linear for reason in EmulatedLinear.supports(each, device)]

    def apply(self, call: ExpertsCall) -> None:
        x, ids, w = call.x, call.ids, call.w
        total = torch.zeros(call.out.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for expert in range(w["w2.weight"].shape[0]):
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            if tokens.numel():
                y = self._multiply(self._middle(self._multiply(x[tokens], "w13", expert, w)), "w2", expert, w)
                total.index_add_(0, tokens, y.to(total.dtype) * call.weights[tokens, places, None].to(total.dtype))
        call.out.copy_(total)

    def _multiply(self, x: torch.Tensor, name: str, expert: int, w: dict[str, torch.Tensor]) -> torch.Tensor:
        """x [T, columns] times one expert's matrix ``name``, plus its bias."""
        slots, specs = expert_matrix(w, name, expert), self.workload.spec_of(name)
        if specs is None or is_plain(specs):
            y = self.multiply(x, slots["weight"], name)
        else:
            weight, activation = specs
            y = self.multiply(fake_quantize(x, activation, slots), dequantize(slots, weight, x.dtype), name)
        return y + slots["bias"] if "bias" in slots else y

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        """x [T, columns] times weight [rows, columns], in their dtype; ``name`` is the matrix', w13 or w2."""
        return functional.linear(x, weight)


def is_plain(specs: tuple[QuantSpec, QuantSpec] | None) -> bool:
    """Whether weights and activations are numbers as they are."""
    return specs is None or all(spec.is_plain for spec in specs)
