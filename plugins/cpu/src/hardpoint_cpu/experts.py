"""Experts kernels over the panels of linear.py: rows sorted by expert, which are read where they lie and never copied.

Axes: T tokens, K experts of a token, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch

from hardpoint.experts.middle import bound_middle, is_gated
from hardpoint_cpu import native
from hardpoint_cpu.block_linear import BlockPanelLinear
from hardpoint_cpu.linear import (
    Int4PanelLinear,
    Int8PanelLinear,
    Mxfp4PanelLinear,
    Nvfp4PanelLinear,
    PanelLinear,
    PlainPanelLinear,
)
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    LinearWorkload,
    Reason,
    expert_matrix,
)
from hardpoint_plugin_api.experts import MATRICES

if TYPE_CHECKING:
    from hardpoint.context import Context


class PanelExperts(ExpertsKernel):
    """Base of the experts kernels: each packs and multiplies an expert's matrix as its linear kernel does."""

    linear: ClassVar[type[PanelLinear]]

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what the linear kernel refuses for either matrix."""
        if workload.hidden_size is None:
            return []
        return [r for matrix in _matrices(workload).values() for r in cls.linear.supports(matrix, device)]

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.num_experts is not None
        assert workload.top_k is not None
        assert workload.activation is not None
        self.layout = self.linear.layout
        self._experts, self._top_k = workload.num_experts, workload.top_k
        self._of = {name: self.linear(ctx, matrix) for name, matrix in _matrices(workload).items()}
        self._numbers = {name: matrix.number(f"experts_{matrix.kernel}") for name, matrix in self._of.items()}
        self._middle = bound_middle(cast("Context", ctx), workload.activation)
        self._sort, self._sum = native.kernel_number("sort_by_expert"), native.number_for("sum_of_experts", ctx.dtype)

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        packed: dict[str, list[torch.Tensor]] = {}
        biases = {slot: weights.pop(slot).contiguous() for slot in list(weights) if slot.endswith(".bias")}
        for name in MATRICES:
            for expert in range(self._experts):
                for slot, value in self._of[name].prepack(expert_matrix(weights, name, expert)).items():
                    packed.setdefault(f"{name}.{slot}", []).append(value)
            for slot in [slot for slot in weights if slot.startswith(f"{name}.")]:
                del weights[slot]
        return {slot: torch.stack(packed.pop(slot)) for slot in list(packed)} | biases

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: torch.stack([self._of[name].unpack(expert_matrix(weights, name, e)) for e in range(self._experts)])
            for name in MATRICES
        }

    def apply(self, call: ExpertsCall) -> None:
        x, ids, w = call.x, call.ids, call.w
        tokens, count = x.shape[0], ids.numel()
        pieces = min(count, self._experts) + count // native.BLOCK_ROWS
        integers = x.new_empty(2 * count, dtype=torch.int32)
        long = x.new_empty(pieces * native.EXPERT_ROWS_BYTES // 8 + self._experts + 1, dtype=torch.int64)
        order, places = integers.data_ptr(), integers.data_ptr() + 4 * count
        starts = long.data_ptr() + pieces * native.EXPERT_ROWS_BYTES
        native.run(self._sort, ids.data_ptr(), order, places, long.data_ptr(), starts, count, self._experts)
        routed = order, long.data_ptr(), count, self._experts
        hidden = self._multiply("w13", native.rows(x), w, routed, self._top_k)
        y = self._multiply("w2", self._middle(hidden), w, routed, 0)
        addresses = y.data_ptr(), places, call.weights.data_ptr(), call.out.data_ptr()
        native.run(self._sum, *addresses, tokens, ids.shape[1], y.shape[1])

    def _multiply(
        self, name: str, x: torch.Tensor, w: dict[str, torch.Tensor], routed: tuple[int, ...], top_k: int
    ) -> torch.Tensor:
        """x [T, columns], or with ``top_k`` 0 sorted rows, times each row's expert's matrix -> sorted rows.

        ``routed`` and ``top_k`` are the members of C++'s ``Routed``.
        """
        matrix = self._of[name]
        out = x.new_empty(routed[2], matrix.n)
        slots = {slot.removeprefix(f"{name}."): value for slot, value in w.items() if slot.startswith(f"{name}.")}
        read = matrix.read(x)
        bias = native.address(slots.get("bias"))
        addresses = (*map(native.address, read), *matrix.parts(slots), bias, out.data_ptr())
        native.run(self._numbers[name], *addresses, *routed, top_k, matrix.n, matrix.k, *matrix.manner(read[0]))
        return out


class PlainExperts(PanelExperts):
    """Numbers of the activations' own dtype."""

    linear = PlainPanelLinear


class Int8Experts(PanelExperts):
    """int8 elements on both sides; a token is rounded once for all its experts."""

    linear = Int8PanelLinear


class Int4Experts(PanelExperts):
    """4-bit elements in groups of columns; activations as they are."""

    linear = Int4PanelLinear


class Mxfp4Experts(PanelExperts):
    """e2m1 with a power of two for 32 columns; activations as they are."""

    linear = Mxfp4PanelLinear


class Nvfp4Experts(PanelExperts):
    """e2m1 with scales of e4m3 for 16 columns, and of float32 for each row; activations as they are."""

    linear = Nvfp4PanelLinear


class BlockExperts(PanelExperts):
    """Blocks of GGUF files; a token is rounded to int8 once for all its experts."""

    linear = BlockPanelLinear


def _matrices(workload: ExpertsWorkload) -> dict[str, LinearWorkload]:
    """Each matrix of one expert, as a linear kernel is asked for it."""
    assert workload.activation is not None
    assert workload.hidden_size is not None
    assert workload.intermediate_size is not None
    width = workload.intermediate_size
    rows = 2 * width if is_gated(workload.activation) else width
    sizes = {"w13": (rows, workload.hidden_size), "w2": (workload.hidden_size, width)}
    return {
        name: LinearWorkload(
            dtype=workload.dtype,
            spec=workload.spec_of(name),
            features=workload.features,
            out_features=out_features,
            in_features=in_features,
        )
        for name, (out_features, in_features) in sizes.items()
    }
