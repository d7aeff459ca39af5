"""Experts by grouped_matmul.py: what is launched for a step, and in what tiles.

Weights are plain, or of 8 or 4 bits with scales for rows, groups of columns or tiles of both. Activations are plain, or
rounded to 8 bits token by token, before either matmul.

Axes: T tokens, K experts of a token, P = T * K pairs, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from hardpoint.experts.middle import unsupported_activation
from hardpoint.kernels.experts_tiling import LayerShape, MatmulShape, Tiling, TilingTable
from hardpoint.kernels.grouped_matmul import expert_tiles
from hardpoint.kernels.launch import begun, in_stages_that_fit
from hardpoint.kernels.paired_experts import BatchedPairs, PairedExperts, Pairs
from hardpoint.kernels.quantize import quantize_rows
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    ExpertsWorkload,
    QuantSpec,
    Reason,
)

_LEAST_HALVED = 128
"""Rows of tiles of which half as many are still worth the whole width of a matrix unit."""
_DEPTH_OF_SHORT_GROUPS = 64
"""Columns of a round whose groups of 16 are scaled one by one: of 128, the compiler for sm_90 spilled registers."""


@dataclass(frozen=True)
class _Form:
    """How a pair of specs has weights stored, as the kernel is told, and by which spec activations are rounded."""

    element: str
    scale_rows: int = 0
    group: int = 0
    short: int = 0
    nibbles: bool = False
    flip: int = 0
    e2m1: bool = False
    rounding: QuantSpec | None = None
    x_group: int = 0

    @classmethod
    def of(cls, workload: ExpertsWorkload) -> _Form:
        """Of plain weights, if the workload says nothing else."""
        if workload.spec is None or workload.spec[0].is_plain:
            return cls(str(workload.dtype))
        weight, activation = workload.spec
        rows, group = (max(size, 0) for size in weight.scales[0].block)
        is_power_of_two = weight.element == "float4_e2m1" and weight.scales[0].format == "float8_e8m0fnu"
        in_place = group == 32 and is_power_of_two and activation.is_plain and workload.dtype != "float16"
        short = group if len(weight.scales) == 2 or in_place else 0
        return cls(
            weight.element,
            rows,
            0 if short else group,
            short,
            weight.packing == "nibbles",
            8 if weight.element == "int4" else 0,
            weight.element == "float4_e2m1",
            None if activation.is_plain else activation,
            0 if activation.is_plain else max(activation.scales[0].block[1], 0),
        )

    @property
    def by_round(self) -> bool:
        """Whether more is done to each round's operands or products than to add them."""
        return self.nibbles or self.group > 0 or self.rounding is not None

    def depth(self, wanted: int) -> int:
        """How far one round goes, which a group's end must end, too."""
        short = _DEPTH_OF_SHORT_GROUPS if self.short == 16 else wanted
        return min(wanted, self.group or wanted, self.x_group or wanted, short)


class TritonGroupedExperts(PairedExperts[Tiling]):
    """Weights as they are stored. Tiles are those tuned for the device and the experts' shape, or chosen by rule.

    ``shape`` is what its tiles depend on, and ``rows_of_w13`` are an expert's.
    """

    most_rows = TilingTable.most_rows

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        self._form = form = _Form.of(workload)
        self.shape = LayerShape(
            self._experts, self._width, self._hidden, ctx.dtype.itemsize, form.element, form.by_round
        )
        self.rows_of_w13 = self._width * (2 if self._gated else 1)
        self._tilings = TilingTable.of(ctx, self.shape)

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that rounds cannot end with, and 8-bit products for results that are more exact than those."""
        if reasons := unsupported_activation(workload.activation):
            return reasons
        if workload.spec is None:
            return []
        groups = [scale.block[1] for spec in workload.spec for scale in spec.scales if len(spec.scales) == 1]
        # Of 16 columns that 4 bits make, Triton's matrix products come out wrong (3.6, on an H200).
        least = 16 if workload.spec[1].is_plain and workload.spec[0].packing == "none" else 32
        reasons = [
            Reason("group", "groups of columns", wanted=str(group), supported=f"powers of two from {least} on")
            for group in groups
            if group != -1 and (group < least or group & (group - 1))
        ]
        if workload.dtype == "float32" and workload.spec[1].element.startswith("float8"):
            supported = "float16, bfloat16"
            reasons.append(Reason("dtype", "sums of products of 8-bit floats", wanted="float32", supported=supported))
        return reasons

    def tiling(self, pairs: int) -> Tiling:
        return self._tilings.of_pairs(pairs)

    def multiply(self, tiling: Tiling, pairs: Pairs) -> None:
        x, ids, w = pairs.x, pairs.ids, pairs.w
        num_pairs, rows = ids.numel(), tiling.rows
        pair_list = self._lists.of(ids, pairs.lists, rows)
        form = self._form
        for name, shape, source, divisor, target, columns, depth in (
            ("w13", tiling.w13, x, ids.shape[1], pairs.middle, self._width, self._hidden),
            ("w2", tiling.w2, pairs.middle, 1, pairs.results, self._hidden, self._width),
        ):
            is_first, weight, x_scale = name == "w13", w[f"{name}.weight"], None
            if form.rounding is not None:
                source, x_scale = quantize_rows(source, spec=form.rounding)
            round_depth = form.depth(shape.depth)
            described = shape.described and _can_be_described(weight)
            arguments = (
                source,
                x_scale,
                self._description(weight, shape.columns, round_depth) if described else weight,
                _as_read(w.get(f"{name}.weight_scale")),
                w.get(f"{name}.weight_zero_point"),
                w.get(f"{name}.weight_scale_2"),
                w.get(f"{name}.bias"),
                target,
                ids,
                pair_list.listed,
                num_pairs,
                columns,
                depth,
                divisor,
                self._activation if is_first else None,
                is_first and self._gated,
                form.scale_rows,
                form.group,
                form.short,
                form.x_group,
                form.nibbles,
                form.flip,
                form.e2m1,
                pair_list.lanes,
                described,
                depth % round_depth == 0,
                rows >= _LEAST_HALVED,
                rows,
                shape.columns,
                round_depth,
            )
            kind = form, x.dtype, rows, shape, is_first, described, x.device
            grid = (pair_list.tiles * triton.cdiv(columns, shape.columns),)
            in_stages_that_fit(kind, shape.num_stages, partial(_launch, grid, shape, x, arguments))

    def _description(self, weight: torch.Tensor, columns: int, depth: int) -> TensorDescriptor:
        """All experts' rows as one matrix, read in blocks. It is not kept, since it would keep the weight."""
        block = [columns, depth // 2 if self._form.nibbles else depth]
        return TensorDescriptor.from_tensor(weight.flatten(0, 1), block)


class TritonBatchedExperts(BatchedPairs):
    """The same over batches."""

    kind = TritonGroupedExperts


def _launch(grid: tuple[int], shape: MatmulShape, x: torch.Tensor, arguments: tuple[Any, ...], num_stages: int) -> None:
    expert_tiles[grid](*arguments, num_warps=shape.num_warps, num_stages=num_stages, **shape.options, **begun(x))


def _as_read(scales: torch.Tensor | None) -> torch.Tensor | None:
    """Scales as a kernel reads them: those of a byte as bytes."""
    return scales.view(torch.uint8) if scales is not None and scales.itemsize == 1 else scales


def _can_be_described(weight: torch.Tensor) -> bool:
    """Whether rows begin where descriptors want them."""
    return weight.data_ptr() % 16 == 0 and weight.stride(1) * weight.itemsize % 16 == 0
