"""The experts kernel: all of a mixture's expert feed-forwards over one step's tokens.

An expert is ``w2 @ act(w13 @ x)``. Weights of E experts, I wide, for hidden size H:

| matrix | shape      | rows                                                              |
|--------|------------|-------------------------------------------------------------------|
| w13    | [E, 2I, H] | the gate's I, then the I that it gates; [E, I, H] where ungated    |
| w2     | [E, H, I]  |                                                                   |

A kernel is given them as a dict of stacked slots, ``MATRIX.SLOT``: ``w13.weight`` and ``w2.weight``, and beside them
what ``quantization.weight_slots`` declares for a quantized matrix, as in ``w13.weight_scale``. E are the experts of
this rank, and ids count them from 0. Where the workload has the feature ``expert_bias``, ``w13.bias`` [E, 2I] and
``w2.bias`` [E, H], in the activations' dtype, are added to the products: an expert is then
``w2 @ act(w13 @ x + b13) + b2``, all of which is weighted. Where it has the feature ``w2_spec``, the slots of w13 are
those of ``workload.spec`` and the slots of w2 those of ``workload.w2_spec``.

There are two formats of activations. In ``standard`` a row is a token, and says which experts it wants; in ``batched``
tokens come sorted into as many rows for each expert. Which one is asked for depends on the all2all in use; a
contribution declares ``format = ["batched"]`` for the second. Tensors are contiguous. Axes: T tokens, K experts per
token, M rows per expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.dequantization import dequantize
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.quant import QuantSpec
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import ExpertsWorkload

if TYPE_CHECKING:
    import torch

ActivationFormat = Literal["standard", "batched"]

MATRICES = ("w13", "w2")


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """The arguments of ``ExpertsKernel.apply``.

    ``x`` [T, H]: the tokens. ``ids`` int32 [T, K]: the experts of each token, -1 for experts of other ranks.
    ``weights`` float32 [T, K]: the router's weights. ``w``: the slots that ``prepack`` returned. ``out`` [T, H], or [T,
    K, H] where ``reduces`` is False. ``workspace`` uint8, of the size that ``workspace_bytes`` asked for. ``scales``:
    the scales of ``x`` where the kernel has an ``input_spec``, else None. Later versions add fields with defaults.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w: dict[str, torch.Tensor]
    out: torch.Tensor
    workspace: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BatchedExpertsCall:
    """The arguments of ``BatchedExpertsKernel.apply``.

    ``x`` [E, M, H]: M rows for each expert; the first ``counts[e]`` rows (int32 [E]) of expert e are tokens, the others
    padding. ``out`` [E, M, H]: the result of each row. ``w``, ``workspace`` and ``scales`` are as in ExpertsCall.
    """

    x: torch.Tensor
    counts: torch.Tensor
    w: dict[str, torch.Tensor]
    out: torch.Tensor
    workspace: torch.Tensor
    scales: torch.Tensor | None = None


class _Experts(ABC):
    """The base of experts kernels of both formats.

    ``layout`` names the weight layout that ``prepack`` returns ("plain": the slots as loaded). ``input_spec`` is the
    quantization that the kernel wants its input in; core then quantizes tokens before it sends them to other ranks.
    None: the kernel gets plain activations, and quantizes them itself where the workload's spec says so.

    ``capturable``: a call may be captured in a graph. Such a call never waits for the device, reads no values of
    tensors on the host, and does the same work for tensors of equal shapes at equal addresses. A step with a kernel
    that is not capturable is captured as piecewise graphs, split at that kernel. ``traceable``: all of the kernel's
    device work is done by torch operators, so that a graph engine that records torch operators alone can record it;
    otherwise such an engine calls the kernel again in each replay.
    """

    format: ClassVar[ActivationFormat]
    layout: str = "plain"
    input_spec: QuantSpec | None = None
    capturable: bool = True
    traceable: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        self.ctx, self.workload = ctx, workload

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: no reason."""
        return []

    def workspace_bytes(self, rows: int) -> int:
        """Return the bytes of scratch memory that ``apply`` needs for up to ``rows`` rows of x (T, or E * M).

        Called at construction. All layers share this memory; nothing in it survives a call. Default: 0.
        """
        return 0

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert loaded slots to this kernel's layout. Runs once, while weights load.

        The caller may free the originals as soon as this returns. Default: the plain layout, no copy.
        """
        return weights

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the dequantized matrices w13 and w2, in the plain layout, by these names.

        They are copies where the layout is not plain. A kernel with a layout of its own must override this.
        """
        import torch

        if self.layout != "plain":
            raise NotImplementedError(f"{type(self).__name__} has layout {self.layout!r} and must define unpack()")
        found = {}
        for name in MATRICES:
            stored, specs = weights[f"{name}.weight"], self.workload.spec_of(name)
            if specs is None or specs[0].is_plain:
                found[name] = stored
                continue
            each = (expert_matrix(weights, name, number) for number in range(stored.shape[0]))
            found[name] = torch.stack([dequantize(slots, specs[0], self.ctx.dtype) for slots in each])
        return found


class ExpertsKernel(_Experts):
    """A kernel for activations in the format ``standard``: one row per token.

    With ``reduces`` False, core multiplies by the router's weights and sums; ``out`` then has one row per token and
    expert.
    """

    format: ClassVar[ActivationFormat] = "standard"
    reduces: bool = True

    @abstractmethod
    def apply(self, call: ExpertsCall) -> None:
        """Run each token through its experts. Mutates ``out`` and ``workspace`` alone.

        ``out`` [T, H] becomes the sum of the results of each token's experts, times their weights, over the experts of
        this rank; zeros for a token that has none here. With ``reduces`` False, ``out`` [T, K, H] becomes the
        unweighted results; entries of experts of other ranks are undefined.
        """


class BatchedExpertsKernel(_Experts):
    """A kernel for activations in the format ``batched``: rows sorted by expert. The all2all weights and sums its
    results.
    """

    format: ClassVar[ActivationFormat] = "batched"

    @abstractmethod
    def apply(self, call: BatchedExpertsCall) -> None:
        """Run each expert over its rows. Mutates ``out`` and ``workspace`` alone; the padding rows of ``out`` are
        undefined.
        """


def expert_matrix(weights: Mapping[str, torch.Tensor], name: str, number: int) -> dict[str, torch.Tensor]:
    """The slots of one expert's matrix ``name`` (w13 or w2), by their plain names; views, not copies."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value[number] for key, value in weights.items() if key.startswith(prefix)}
