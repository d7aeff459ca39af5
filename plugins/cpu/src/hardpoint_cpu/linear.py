"""Linear kernels over panels of 16 rows (csrc/kernels/panels.h): one packed weight for GEMV, GEMM and look-ups.

Packing drops the original. Axes: M rows of x, N rows of the weight (out), K columns (in), G groups of columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from hardpoint_cpu import native
from hardpoint_cpu.ops.quantize import rounded
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    Feature,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    Reason,
)

_MOST_INT8_COLUMNS = (2**31 - 1) // 128**2
"""Of a weight whose products with int8 activations are summed in 32 bits."""


class PanelLinear(LinearKernel):
    """Base of the linear kernels."""

    kernel: ClassVar[str]
    """The compiled kernel that multiplies; that of experts has ``experts_`` before it."""
    look_up: ClassVar[str]
    """The one that makes rows of the weight numbers again."""
    pairs: ClassVar[bool] = False
    """Whether bfloat16 activations are read in pairs."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse an odd number of columns where they are read in pairs."""
        columns = workload.in_features or 0
        if not (cls.pairs and workload.dtype == "bfloat16" and columns % 2):
            return []
        return [Reason("in-features", "bfloat16 is read in pairs", wanted=str(columns), supported="even")]

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.in_features is not None
        assert workload.out_features is not None
        self.n, self.k = workload.out_features, workload.in_features
        self.alike = Feature.BATCH_INVARIANT in workload.features
        self._multiply, self._look_up = self.number(self.kernel), self.number(self.look_up)

    def number(self, name: str) -> int:
        """The number of a kernel for the dtypes in use."""
        return native.number_for(name, self.ctx.dtype)

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._rows(weights, None, self.n)

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return self._rows(weights, ids, ids.shape[0])

    @abstractmethod
    def _rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor | None, count: int) -> torch.Tensor:
        """Rows ``ids`` (None: all) of the weight as numbers, [count, K]."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        x = call.x
        out = x.new_empty(*x.shape[:-1], self.n, dtype=self.ctx.dtype)
        read = self.read(native.rows(x)) if call.scales is None else (x, call.scales)
        addresses = (*map(native.address, read), *self.parts(call.weights), native.address(call.bias), out.data_ptr())
        native.run(self._multiply, *addresses, read[0].shape[0], self.n, self.k, *self.manner(read[0]))
        return out

    def read(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The input of the kernel for x [M, K], elements of a row one by one: itself, unless it is rounded first."""
        return (x,)

    @abstractmethod
    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        """The addresses of a packed weight, as the kernel takes them."""

    def manner(self, x: torch.Tensor) -> tuple[int, ...]:
        """The kernel's arguments behind N and K, for what it reads of x."""
        return x.stride(0), self.alike

    def _by_row(self, x: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """``x`` [N, ...], padded with ``fill`` to whole panels."""
        padded = x.new_full((self._padded(), *x.shape[1:]), fill)
        padded[: self.n] = x
        return padded

    def _padded(self) -> int:
        """The weight's rows, those of padding included."""
        return -(-self.n // native.PANEL_ROWS) * native.PANEL_ROWS


class PlainPanelLinear(PanelLinear):
    """Numbers of the activations' own dtype."""

    layout, kernel, look_up, pairs = "panels", "linear", "unpack_rows", True

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = native.rows(weights["weight"])
        packed = weight.new_empty(self._padded() * self.k)
        addresses = weight.data_ptr(), packed.data_ptr()
        native.run(self.number("pack_linear"), *addresses, self.n, self.k, weight.stride(0))
        return {"weight": packed}

    def _rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor | None, count: int) -> torch.Tensor:
        packed = weights["weight"]
        out = packed.new_empty(count, self.k)
        native.run(self._look_up, packed.data_ptr(), native.address(ids), out.data_ptr(), count, self.n, self.k)
        return out

    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        return (weights["weight"].data_ptr(),)


class Int8WeightPanelLinear(PanelLinear):
    """int8 elements, a scale for each row; activations as they are."""

    layout, kernel, look_up, pairs = "panels_int8", "linear_int8_weight", "unpack_int8", True

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight, size = native.rows(weights["weight"]), self._padded()
        packed = weight.new_empty(size * (-(-self.k // 4) * 4))
        row_sums = weight.new_empty(size, dtype=torch.int32)
        addresses = weight.data_ptr(), packed.data_ptr(), row_sums.data_ptr()
        native.run(native.kernel_number("pack_int8"), *addresses, self.n, self.k, weight.stride(0))
        scale = self._by_row(weights["weight_scale"].float().expand(self.n, 1)[:, 0])
        return {"weight": packed, "row_sums": row_sums, "weight_scale": scale}

    def _rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor | None, count: int) -> torch.Tensor:
        packed = weights["weight"]
        out = packed.new_empty(count, self.k, dtype=self.ctx.dtype)
        addresses = packed.data_ptr(), weights["weight_scale"].data_ptr(), native.address(ids), out.data_ptr()
        native.run(self._look_up, *addresses, count, self.k)
        return out

    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        return weights["weight"].data_ptr(), weights["weight_scale"].data_ptr()


class Int8PanelLinear(Int8WeightPanelLinear):
    """int8 elements on both sides, a scale for each row of each; activations are rounded when they come, or before."""

    kernel, pairs = "linear_int8", False

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse rows whose sum of products may not fit 32 bits."""
        if (workload.in_features or 0) <= _MOST_INT8_COLUMNS:
            return []
        text = "sums of whole numbers have 32 bits"
        return [Reason("in-features", text, wanted=str(workload.in_features), supported=f"up to {_MOST_INT8_COLUMNS}")]

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        activation = workload.spec[1]
        self.input_spec = activation if activation.scales[0].format == "float32" else None

    def read(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return rounded(x)

    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        return (*super().parts(weights), weights["row_sums"].data_ptr())

    def manner(self, x: torch.Tensor) -> tuple[int, ...]:
        return ()


class NibblePanelLinear(PanelLinear):
    """Base of those of 4-bit elements in groups of columns; activations as they are."""

    flip: int = 0
    """The number that is added to a code, modulo 16, where it is packed."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that are no multiple of 8 columns, and an uneven last group."""
        assert workload.spec is not None
        columns = workload.in_features or 0
        group = columns if workload.spec[0].scales[0].block[1] == -1 else workload.spec[0].scales[0].block[1]
        if group % 8 == 0 and (not group or columns % group == 0):
            return []
        supported = "a multiple of 8 that divides the columns"
        return [Reason("group", "groups of columns", wanted=f"{group} of {columns}", supported=supported)]

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        block = workload.spec[0].scales[0].block
        self.group = self.k if block[1] == -1 else block[1]

    def packed(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` [N, K / 2] in panels."""
        stored = native.rows(weight)
        packed = stored.new_empty(self._padded() * self.k // 2)
        addresses = stored.data_ptr(), packed.data_ptr()
        native.run(native.kernel_number("pack_int4"), *addresses, self.n, self.k, stored.stride(0), self.flip)
        return packed

    def by_panel(self, x: torch.Tensor) -> torch.Tensor:
        """[N, G] -> [panels, G, 16]."""
        padded = self._by_row(x.expand(self.n, -1))
        return padded.view(-1, native.PANEL_ROWS, padded.shape[1]).transpose(1, 2).contiguous()

    def _rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor | None, count: int) -> torch.Tensor:
        out = weights["weight"].new_empty(count, self.k, dtype=self.ctx.dtype)
        parts = self.parts(weights)
        native.run(self._look_up, *parts, native.address(ids), out.data_ptr(), count, self.k, self.group)
        return out

    def manner(self, x: torch.Tensor) -> tuple[int, ...]:
        return self.group, *super().manner(x)


class Int4PanelLinear(NibblePanelLinear):
    """4-bit integers, with or without zero points."""

    layout, kernel, look_up = "panels_int4", "linear_int4", "unpack_int4"

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        assert workload.spec is not None
        self._spec = workload.spec[0]
        same = self._spec.scales[0].format == str(ctx.dtype).removeprefix("torch.")
        self._scale_dtype = ctx.dtype if same else torch.float32
        self.flip = 8 if self._spec.element == "int4" else 0
        super().__init__(ctx, workload)

    def number(self, name: str) -> int:
        """The number of a kernel that there is for pairs of dtypes: of activations, and of scales."""
        return native.number_for(f"{name}_{str(self.ctx.dtype).removeprefix('torch.')}", self._scale_dtype)

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = self.by_panel(weights["weight_scale"].to(self._scale_dtype))
        prepared = {"weight": self.packed(weights["weight"]), "weight_scale": scale}
        if self._spec.zero_point:
            zeros = (weights["weight_zero_point"].int() + self.flip).to(torch.uint8)
            prepared["weight_zero_point"] = self.by_panel(zeros)
        elif not self.flip:
            prepared["weight_zero_point"] = torch.zeros_like(scale, dtype=torch.uint8)
        return prepared

    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        zeros = weights.get("weight_zero_point")
        return weights["weight"].data_ptr(), weights["weight_scale"].data_ptr(), native.address(zeros)


class Mxfp4PanelLinear(NibblePanelLinear):
    """e2m1 with a power of two (e8m0) for 32 columns."""

    layout, kernel, look_up = "panels_mxfp4", "linear_mxfp4", "unpack_mxfp4"

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = self.by_panel(weights["weight_scale"].view(torch.uint8))
        return {"weight": self.packed(weights["weight"]), "weight_scale": scale}

    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        outer = weights.get("weight_scale_2")
        return weights["weight"].data_ptr(), weights["weight_scale"].data_ptr(), native.address(outer)


class Nvfp4PanelLinear(Mxfp4PanelLinear):
    """e2m1 with scales of e4m3 for 16 columns, and of float32 for each row or the whole."""

    layout, kernel, look_up = "panels_nvfp4", "linear_nvfp4", "unpack_nvfp4"

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outer = self._by_row(weights["weight_scale_2"].float().expand(self.n, 1)[:, 0])
        return {**super().prepack(weights), "weight_scale_2": outer}
