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
``w2 @ act(w13 @ x + b13) + b2``, all of which is weighted.

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

    ``x`` [T, H]; ``ids`` int32 [T, K], -1 where an expert is not on this rank; ``weights`` float32 [T, K], the
    router's; ``w`` the slots that ``prepack`` returned; ``out`` [T, H], or [T, K, H] where ``reduces`` is False;
    ``workspace`` uint8, as many bytes as asked for. ``scales`` are those of ``x`` where ``input_spec`` is given, and
    None otherwise. Later versions add fields with defaults.
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

    ``x`` [E, M, H], of which expert e's first ``counts[e]`` rows (int32 [E]) mean something; ``out`` [E, M, H]; the
    others are as in ExpertsCall.
    """

    x: torch.Tensor
    counts: torch.Tensor
    w: dict[str, torch.Tensor]
    out: torch.Tensor
    workspace: torch.Tensor
    scales: torch.Tensor | None = None


class _Experts(ABC):
    """What kernels of both formats share.

    ``layout`` names the weight layout that ``prepack`` produces ("plain": the slots as loaded). ``input_spec`` is the
    form that it wants its input in, by which core quantizes before tokens are sent to other ranks; None means plain
    activations, which the kernel quantizes itself where its workload's spec says so.

    ``capturable`` says whether a call may be recorded in a graph: it never waits for the device, reads no tensor's
    values on the host, and does the same work for tensors of the same shapes at the same addresses. Steps run in
    pieces around a kernel that is not. ``traceable`` says that all of its device work is torch's operators, so that a
    graph engine that knows these alone may record them one by one; otherwise such an engine calls the kernel again in
    each run.
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
        """Say what data cannot; called once, after import. Default: nothing to add."""
        return []

    def workspace_bytes(self, rows: int) -> int:
        """How much scratch memory ``apply`` wants for up to ``rows`` rows of x (T, or E * M). Asked when it is built.

        All layers share it, and it holds nothing from one call to the next. Default: none.
        """
        return 0

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Turn loaded slots into this kernel's layout; runs once, while weights load.

        The originals may be dropped by the caller as soon as this returns. Default: the plain layout, no copy.
        """
        return weights

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return w13 and w2 plain and dequantized, by these names (copies where the layout is not plain).

        A kernel with a layout of its own overrides this.
        """
        import torch

        if self.layout != "plain":
            raise NotImplementedError(f"{type(self).__name__} has layout {self.layout!r} and must define unpack()")
        if self.workload.spec is None or self.workload.spec[0].is_plain:
            return {name: weights[f"{name}.weight"] for name in MATRICES}
        spec, num_experts = self.workload.spec[0], weights["w2.weight"].shape[0]
        return {
            name: torch.stack(
                [dequantize(expert_matrix(weights, name, e), spec, self.ctx.dtype) for e in range(num_experts)]
            )
            for name in MATRICES
        }


class ExpertsKernel(_Experts):
    """A kernel that takes activations in the format ``standard``.

    ``reduces`` False says that it leaves weighting and summing to core: ``out`` has a row for each expert of a token.
    """

    format: ClassVar[ActivationFormat] = "standard"
    reduces: bool = True

    @abstractmethod
    def apply(self, call: ExpertsCall) -> None:
        """Run each token through its experts. Mutates ``out`` and ``workspace`` alone.

        ``out`` [T, H] becomes for each token the sum of its experts' results, each times its weight, and zeros where
        none is on this rank. Where ``reduces`` is False, ``out`` [T, K, H] becomes the results as they are, and
        anything where an expert is not on this rank.
        """


class BatchedExpertsKernel(_Experts):
    """A kernel that takes activations in the format ``batched``. Weighting and summing is the all2all's."""

    format: ClassVar[ActivationFormat] = "batched"

    @abstractmethod
    def apply(self, call: BatchedExpertsCall) -> None:
        """Run each expert over its rows. Mutates ``out`` and ``workspace`` alone.

        Rows of ``out`` behind an expert's ``counts`` may become anything.
        """


def expert_matrix(weights: Mapping[str, torch.Tensor], name: str, number: int) -> dict[str, torch.Tensor]:
    """The slots of one expert's matrix ``name`` (w13 or w2), by their plain names; views, not copies."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value[number] for key, value in weights.items() if key.startswith(prefix)}
