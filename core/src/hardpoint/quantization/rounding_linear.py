"""Base of linear kernels that multiply by rounded activations: they round activations that come unrounded.

Axes: T tokens, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, cast

import torch

from hardpoint import numerics
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint_plugin_api import BuildContext, LinearCall, LinearKernel, LinearWorkload, QuantSpec

if TYPE_CHECKING:
    from hardpoint.context import Context


class RoundingLinear(LinearKernel):
    """Wants its input as its activations' spec says, where that can be written in passing.

    ``activation`` is that spec, None where activations stay plain.
    """

    activation: QuantSpec | None = None

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        spec = workload.spec[1]
        self.activation = None if spec.is_plain else spec
        if self.activation is not None and not spec.static:
            self.input_spec = spec
            self._round = quantize_rows.bind(cast("Context", ctx), spec=spec)

    def rounded(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` [T, K] as elements of the spec, and float32 scales: [T, 1], [T, K / k], or [1, 1] of a static spec."""
        assert self.activation is not None
        if self.activation.static:
            rounded = numerics.quantize_rows(x, self.activation, weights)
            return rounded.codes, rounded.scale
        return self._round(x, spec=self.activation)


class LibraryProduct(RoundingLinear):
    """A linear kernel of a library that multiplies two rounded operands."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, scales, weights = call.x, call.scales, call.weights
        if scales is None:
            x, scales = self.rounded(x.reshape(-1, x.shape[-1]), weights)
        y = self.product(x, scales, weights, call.bias)
        return y.view(*call.x.shape[:-1], weights["weight"].shape[0])

    @abstractmethod
    def product(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Rounded rows [T, K] with their scales, times the weight, plus the bias: [T, N]."""
