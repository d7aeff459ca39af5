"""The linear kernel over e4m3 in panels (csrc/kernels/linear_float8.h).

Axes: M rows of x, N rows of the weight (out), K columns (in), G groups of columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint_cpu import native
from hardpoint_cpu.linear import PanelLinear
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearCall, LinearWorkload, Reason

_MARK_COLUMNS = 32
"""Of a panel, that have one mark."""


class Float8PanelLinear(PanelLinear):
    """e4m3 with a scale for all, for each row, or for each block of rows and columns.

    Activations stay as they are, or are rounded to e4m3 and back.
    """

    layout, kernel, look_up, pairs = "panels_float8", "linear_float8", "unpack_float8", True

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that are no multiple of 4 columns, and scales of scales."""
        assert workload.spec is not None
        reasons, scales = super().supports(workload, device), workload.spec[0].scales
        group = scales[0].block[1]
        if group != -1 and group % 4:
            reasons.append(Reason("group", "groups of columns", wanted=str(group), supported="a multiple of 4"))
        if len(scales) > 1:
            reasons.append(Reason("scales", "scales of an element", wanted=str(len(scales)), supported="1"))
        return reasons

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        block, activation = workload.spec[0].scales[0].block, workload.spec[1]
        self._block_rows = self.n if block[0] == -1 else block[0]
        self._group = self.k if block[1] == -1 else min(block[1], self.k)
        self._rounding, self._round = not activation.is_plain, self.number("round_float8")
        span = -1 if activation.is_plain else activation.scales[0].block[1]
        self._span = self.k if span == -1 else span

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codes, size = native.rows(weights["weight"].view(torch.uint8)), self._padded()
        packed = codes.new_empty(size * (-(-self.k // 4) * 4))
        marks = codes.new_empty(size // native.PANEL_ROWS * -(-self.k // _MARK_COLUMNS))
        by_row = weights["weight_scale"].float().repeat_interleave(self._block_rows, 0)[: self.n]
        scale = self._by_row(by_row).unflatten(0, (-1, native.PANEL_ROWS)).transpose(1, 2).contiguous()
        addresses = codes.data_ptr(), packed.data_ptr(), marks.data_ptr(), scale.data_ptr()
        native.run(native.kernel_number("pack_float8"), *addresses, self.n, self.k, self._group, codes.stride(0))
        given = {"input_scale": weights["input_scale"].float()} if "input_scale" in weights else {}
        return {"weight": packed, "marks": marks, "weight_scale": scale, **given}

    def _rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor | None, count: int) -> torch.Tensor:
        out = weights["weight"].new_empty(count, self.k, dtype=self.ctx.dtype)
        addresses = weights["weight"].data_ptr(), weights["weight_scale"].data_ptr(), native.address(ids)
        native.run(self._look_up, *addresses, out.data_ptr(), count, self.k, self._group)
        return out

    def apply(self, call: LinearCall) -> torch.Tensor:
        if self._rounding:
            call = replace(call, x=self.rounded(call.x, call.weights))
        return super().apply(call)

    def rounded(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """``x`` [..., K] rounded to e4m3 and back, by the slot ``input_scale`` or as each stretch of a row wants."""
        rows = native.rows(x)
        out = rows.new_empty(rows.shape)
        addresses = rows.data_ptr(), native.address(weights.get("input_scale")), out.data_ptr()
        native.run(self._round, *addresses, *rows.shape, self._span, rows.stride(0))
        return out.view(x.shape)

    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        return tuple(weights[name].data_ptr() for name in ("weight", "marks", "weight_scale"))

    def manner(self, x: torch.Tensor) -> tuple[int, ...]:
        return self._group, *super().manner(x)
