"""Numeric specs: what the numbers in a tensor mean, whoever wrote them.

A quantized value is ``w = (q - zero_point) * scale_1 * scale_2 * ...``; nibbles are packed low first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """One level of scales: its format and the block of (rows, columns) that shares one value; -1 means all.

    tensor (-1, -1); output channel or token (1, -1); group (1, G); tile (128, 128).
    """

    format: str
    block: tuple[int, int]


@dataclass(frozen=True)
class QuantSpec:
    """How one operand is stored: element type, packing, scales (they multiply), zero point.

    ``element`` is a torch dtype's name, or ``int4``, ``uint4``, ``float4_e2m1``. ``packing`` is ``none`` or names one.
    ``static`` says whether the scales come with the checkpoint (weights always) or are computed per call.
    ``permuted`` says whether input columns were reordered (``desc_act``).
    """

    element: str
    packing: str = "none"
    scales: tuple[Scale, ...] = ()
    zero_point: bool = False
    static: bool = True
    permuted: bool = False

    @property
    def is_plain(self) -> bool:
        """True where the elements are the values."""
        return not self.scales

    def __str__(self) -> str:
        text = self.element
        for scale in self.scales:
            text += f"*{scale.format}[{scale.block[0]},{scale.block[1]}]"
        flags = [("asym", self.zero_point), ("dynamic", not self.static), ("permuted", self.permuted)]
        return text + "".join(f"+{name}" for name, on in flags if on)
