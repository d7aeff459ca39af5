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
    """Activations [T, K] that travel quantized, from the op that made them to the kernel that multiplies them.

    ``data`` [T, K] are elements of ``spec``, row after row without gaps; ``scale`` is float32, [T, 1], or [T, K / k]
    for blocks of k columns (rounded up). A number is its element times the scale of its block.
    """

    data: torch.Tensor
    scale: torch.Tensor
    spec: QuantSpec

    @property
    def shape(self) -> torch.Size:
        """[T, K]."""
        return self.data.shape


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The arguments of ``LinearKernel.apply``.

    ``x`` [T, in] in the workload's dtype, whose rows may lie apart; ``weights`` the slots that ``prepack`` returned;
    ``bias`` [out]. Where ``scales`` are given, ``x`` holds elements of the kernel's ``input_spec``, and they are its
    scales, as in Quantized. Later versions add fields with defaults.
    """

    x: torch.Tensor
    weights: dict[str, torch.Tensor]
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None


class LinearKernel(ABC):
    """Multiplies by one weight. ``prepack`` runs once, while weights load; ``apply`` is on the token path.

    ``layout`` names the weight layout that ``prepack`` produces ("plain": the slots of ``weight_slots`` as loaded).
    ``input_spec`` is the form it wants its input in. Where the op before the layer can write that form, ``apply`` is
    given elements and scales, and no pass over the activations is spent on rounding them. The spec must be dynamic,
    with one level of scales, each of a row's own, without zero points, of elements that lie one by one. A kernel
    without an ``input_spec``, and a call without ``scales``, get plain activations, which ``apply`` quantizes itself
    where the workload's spec says so, as the op ``quantize_rows`` does: divided by the scale, to the nearest, ties to
    even; a dynamic scale is the largest magnitude over the largest element. ``capturable`` and ``traceable`` are as in
    ExpertsKernel. ``overlapped`` says that its device work begins before what was launched before it has ended
    (programmatic dependent launch): until it has waited for that, it touches nothing but weights.
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
        """Say what data cannot; called once, after import. Default: nothing to add."""
        return []

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> Sequence[tuple[int, int, int]]:
        """Where it serves a few sizes only: some to try it with, small ones first, as tokens, out, in.

        Default: none, and the conformance kit takes sizes of its own.
        """
        return ()

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Turn loaded slots (those of ``weight_slots`` for the workload's spec) into this kernel's layout.

        The originals may be dropped by the caller as soon as this returns. It runs again where weights are updated.
        Default: the plain layout, no copy.
        """
        return weights

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the plain, dequantized weight [out, in] in the workload's dtype.

        It is a copy where the layout is not plain.

        A kernel with a layout of its own overrides this.
        """
        return self._dequantized(weights, None)

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Return rows ``ids`` [T] of the plain weight, [T, in] in the workload's dtype.

        So a tied embedding reads the head's one copy.
        A kernel with a layout of its own overrides this; unpacking the whole weight per step would be no answer.
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
        """Return the call's ``x`` times the weight, plus its ``bias``: [T, out] in the workload's dtype.

        What float16 cannot hold is infinite. ``call.weights`` may hold other numbers at the same addresses later on.
        """
