"""Results that do not depend on the batch: each expert's matmuls always on as many rows."""

from __future__ import annotations

import torch

from hardpoint.experts.middle import row_by_row_middle
from hardpoint.reference.batch_invariant_linear import BatchInvariantLinear
from hardpoint.reference.emulated_linear import BatchInvariantEmulatedLinear
from hardpoint.reference.experts import ReferenceExperts, is_plain
from hardpoint_plugin_api import BuildContext, ExpertsWorkload, LinearCall, LinearKernel, LinearWorkload, expert_matrix
from hardpoint_plugin_api.experts import MATRICES


class BatchInvariantExperts(ReferenceExperts):
    """The reference, in which a token meets batch-invariant kernels only.

    A token's experts are added up by their numbers, whichever other tokens they have.
    """

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.activation is not None
        self._middle = row_by_row_middle(workload.activation)
        self._kernels: dict[tuple[str, int], LinearKernel] = {}

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Settle the size of a tile for each matrix, see BatchInvariantLinear; weights stay as they are."""
        for name in MATRICES:
            specs = self.workload.spec_of(name)
            kind = BatchInvariantLinear if is_plain(specs) else BatchInvariantEmulatedLinear
            linear = LinearWorkload(spec=specs, features=self.workload.features)
            for expert in range(weights["w2.weight"].shape[0]):
                self._kernels[name, expert] = kernel = kind(self.ctx, linear)
                kernel.prepack(expert_matrix(weights, name, expert))
        return weights

    def _multiply(self, x: torch.Tensor, name: str, expert: int, w: dict[str, torch.Tensor]) -> torch.Tensor:
        slots = expert_matrix(w, name, expert)
        return self._kernels[name, expert].apply(LinearCall(x, slots, slots.get("bias")))
