"""Linear kernels over what GGUF files hold, in panels of their own (csrc/kernels/linear_blocks.h).

Elements of up to four bits stay nibbles, elements of five and six bits take six, others are bytes. Activations are
rounded to int8, 32 columns with a scale.
Axes: M rows of x, N rows of the weight (out), K columns (in), G groups of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hardpoint_cpu import native
from hardpoint_cpu.linear import PanelLinear
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearWorkload, QuantSpec, Reason

_COLUMNS = 32
"""Of activations that share a scale."""
_GROUPS = (16, 32)
_SIX_BIT_CENTER = 32
"""Taken off codes of six bits without a zero of their own, where sums have 16 bits (csrc/kernels/pair_products.h)."""
_MOST_ROWS = 16
"""Of activations that vector registers multiply where there are tiles."""


class _Codes(NamedTuple):
    """How an element becomes a code of 0 and more: what is added, the kernels for codes so large, and their bits."""

    zero: int
    kernel: str
    packing: str
    bits: int


_CODES = {
    "uint2": _Codes(0, "linear_nibble_blocks", "nibble_blocks", 4),
    "int3": _Codes(4, "linear_nibble_blocks", "nibble_blocks", 4),
    "int4": _Codes(8, "linear_nibble_blocks", "nibble_blocks", 4),
    "uint4": _Codes(0, "linear_nibble_blocks", "nibble_blocks", 4),
    "int5": _Codes(16, "linear_six_bit_blocks", "six_bit_blocks", 6),
    "uint5": _Codes(0, "linear_six_bit_blocks", "six_bit_blocks", 6),
    "int6": _Codes(32, "linear_six_bit_blocks", "six_bit_blocks", 6),
    "int8": _Codes(128, "linear_byte_blocks", "byte_blocks", 8),
}


class BlockPanelLinear(PanelLinear):
    """Whole numbers in groups of columns, with scales of one or two levels and minima; int8 activations."""

    layout = "panels_blocks"

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse columns that their blocks do not divide, and groups of other sizes than 16 and 32.

        Groups of 16 have scales of two levels, and elements of at most six bits, as in all of GGUF's types.
        """
        assert workload.spec is not None
        blocks = [scale.block[1] for scale in workload.spec[0].scales]
        columns = workload.in_features or 0
        halves = blocks[0] == _COLUMNS // 2 and (len(blocks) == 1 or workload.spec[0].element == "int8")
        if columns % max(_COLUMNS, *blocks) == 0 and blocks[0] in _GROUPS and not halves:
            return []
        supported = f"a multiple of {max(_COLUMNS, *blocks)}, in groups of {' or '.join(map(str, _GROUPS))}"
        if halves:
            supported += ", of 16 with scales of two levels and at most six bits"
        return [Reason("group", "groups of columns", wanted=f"{blocks[0]} of {columns}", supported=supported)]

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> Sequence[tuple[int, int, int]]:
        """Columns that blocks of every size divide; tokens for vector registers, and for tiles."""
        return (3, 40, 256), (1, 72, 512), (13, 130, 1024), (70, 48, 512)

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        assert workload.spec is not None
        self._spec: QuantSpec = workload.spec[0]
        self._codes = _CODES[self._spec.element]
        self.kernel, self.look_up = self._codes.kernel, f"unpack_{self._codes.packing}"  # type: ignore[misc]  # by spec
        super().__init__(ctx, workload)
        self._group = self._spec.scales[0].block[1]
        outer, is_signed = self._spec.scales[-1].block[1], self._spec.scales[0].format == "int8"
        self._numbers = self._group, outer, self._codes.zero, int(is_signed)
        self._round = self.number("round_blocks")
        bits, zero = self._codes.bits, self._codes.zero
        self._starting = zero or _SIX_BIT_CENTER * (bits == 6), 16 if bits == 6 else self._group
        one_level_of_nibbles = bits == 4 and len(self._spec.scales) == 1
        in_pairs = native.level() == "avx2" and (bits == 6 or self._group == 16 or one_level_of_nibbles)
        self._spans = self.k // self._starting[1] if in_pairs else 0
        self._tiled = ctx.dtype == torch.bfloat16 and native.level() == "amx" and not self.alike

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = native.rows(weights["weight"]).view(torch.uint8)
        packed = stored.new_empty(self._padded() * self.k * self._codes.bits // 8)
        pack = native.kernel_number(f"pack_{self._codes.packing}")
        native.run(pack, stored.data_ptr(), packed.data_ptr(), self.n, self.k, stored.stride(0), self._codes.zero)
        scales = {name: self._by_panel(value) for name, value in weights.items() if name != "weight"}
        return {"weight": packed, **scales}

    def _by_panel(self, x: torch.Tensor) -> torch.Tensor:
        """[N, G] -> [panels, G, 16]."""
        padded = self._by_row(x)
        return padded.view(-1, native.PANEL_ROWS, padded.shape[1]).transpose(1, 2).contiguous()

    def read(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        rows, columns = x.shape
        codes = torch.empty((rows, columns), dtype=torch.int8)
        scales = torch.empty((rows, columns // _COLUMNS), dtype=torch.float32)
        sums = torch.empty((rows, columns // self._group), dtype=torch.float32)
        starts = torch.empty((rows, self._spans), dtype=torch.int32)  # none: the null pointer
        numbers = x.new_empty(x.shape if self._tiled and rows > _MOST_ROWS else 0)
        if rows:
            addresses = x.data_ptr(), *map(native.address, (codes, scales, sums, starts, numbers))
            native.run(self._round, *addresses, rows, columns, self._group, x.stride(0), *self._starting)
        return codes, scales, sums, starts, numbers

    def parts(self, weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
        levels = len(self._spec.scales)
        scales = [weights.get(f"weight_{of}{'_2' if level else ''}") for of in ("scale", "min") for level in (0, 1)]
        if levels == 1:  # the one level is the outer
            scales = [None, scales[0], None, scales[2]]
        return weights["weight"].data_ptr(), *map(native.address, scales)

    def manner(self, x: torch.Tensor) -> tuple[int, ...]:
        return self._numbers

    def _rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor | None, count: int) -> torch.Tensor:
        out = weights["weight"].new_empty(count, self.k, dtype=self.ctx.dtype)
        addresses = *self.parts(weights), native.address(ids), out.data_ptr()
        native.run(self._look_up, *addresses, count, self.k, *self._numbers)
        return out
