"""The linear kernel: a matmul behind a pair of quantization specs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.dequantization import dequantize
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.quant import QuantSpec
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import LinearWorkload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Quantized:
    """Quantized activations [T, K], passed from the op that wrote them to the matmul that reads them.

    ``data`` [T, K]: elements of ``spec``, contiguous. ``scale`` float32 [T, 1], or [T, ceil(K / k)] for blocks of k
    columns. A number is its element times the scale of its block.
    """

    data: torch.Tensor
    scale: torch.Tensor
    spec: QuantSpec

    @property
    def shape(self) -> torch.Size:
        """The shape of ``data``: [T, K], T tokens and K columns."""
        return self.data.shape


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The arguments of ``LinearKernel.apply``.

    ``x`` [T, in] in the workload's dtype; its rows need not be contiguous. ``weights``: the slots that ``prepack``
    returned. ``bias`` [out], or None. With ``scales``, ``x`` holds elements of the kernel's ``input_spec``, and
    ``scales`` are theirs, as in Quantized. Later versions add fields with defaults.
    """

    x: torch.Tensor
    weights: dict[str, torch.Tensor]
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None


class LinearKernel(ABC):
    """A matrix multiplication by one weight. ``prepack`` runs once, while weights load; ``apply`` runs in every step.

    ``layout`` names the weight layout that ``prepack`` returns ("plain": the slots of ``weight_slots`` as loaded).

    ``input_spec`` is the quantization that the kernel wants its input in. Where the previous op can write it, ``apply``
    gets elements and scales, and no extra pass quantizes the activations. The spec must be dynamic, with one level of
    scales that are separate for each row, without zero points or packing. Without an ``input_spec``, or in a call
    without ``scales``, ``apply`` gets plain activations. It quantizes them itself where the workload's spec says so, as
    the op ``quantize_rows`` does: divided by the scale and rounded to the nearest, ties to even; a dynamic scale is the
    largest magnitude divided by the largest element.

    ``capturable`` and ``traceable`` are as in ExpertsKernel. ``overlapped``: the kernel's device work may begin before
    earlier launches have ended (programmatic dependent launch); until it has waited for them, it reads weights only.
    """

    layout: str = "plain"
    input_spec: QuantSpec | None = None
    capturable: bool = True
    traceable: ClassVar[bool] = False
    overlapped: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        self.ctx, self.workload = ctx, workload

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: no reason."""
        return []

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> Sequence[tuple[int, int, int]]:
        """Return sizes to test the kernel with, (tokens, out, in), small ones first, for a kernel that serves few
        sizes.

        Default: none; the conformance kit then takes sizes of its own.
        """
        return ()

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert loaded slots (``weight_slots`` of the workload's spec) to this kernel's layout. Runs while weights
        load.

        The caller may free the originals as soon as this returns. It runs again when weights are updated. Default: the
        plain layout, no copy.
        """
        return weights

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the dequantized weight [out, in] in the workload's dtype.

        It is a copy where the layout is not plain. A kernel with a layout of its own must override this.
        """
        return self._dequantized(weights, None)

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Return rows ``ids`` [T] of the dequantized weight: [T, in] in the workload's dtype.

        A tied embedding reads the output head's weight by this method. A kernel with a layout of its own must override
        it, and should not unpack the whole weight, since it runs in every step.
        """
        return self._dequantized(weights, ids)

    def _dequantized(self, weights: dict[str, torch.Tensor], ids: torch.Tensor | None) -> torch.Tensor:
        if self.layout != "plain":
            raise NotImplementedError(
                f"{type(self).__name__} has layout {self.layout!r} and must define unpack() and rows()"
            )
        if self.workload.spec is None or self.workload.spec[0].is_plain:
            return weights["weight"] if ids is None else weights["weight"][ids]
        return dequantize(weights, self.workload.spec[0], self.ctx.dtype, ids)

    @abstractmethod
    def apply(self, call: LinearCall) -> torch.Tensor:
        """Return ``x`` times the weight, plus ``bias``: [T, out] in the workload's dtype.

        Results beyond float16's range become infinite. The tensors in ``call.weights`` keep their addresses, but a
        weight update may change their values.
        """
