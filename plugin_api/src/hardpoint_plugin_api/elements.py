"""Elements: the number formats that quantized matrices are stored in, before any scale.

An element has at most eight bits, so its values can be listed. The list gives the largest magnitude, the rounding
error, and whether zero points make sense. Emulation, the experts reference, methods that quantize while loading and the
conformance kit need nothing but an ``Element``. A plugin offers one of its own in the family ``element``: the target is
an instance, the contribution has the element's name. A spec of it is ``QuantSpec.of(ELEMENT, scales)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Final

from hardpoint_plugin_api.errors import UnknownNameError

if TYPE_CHECKING:
    import torch

_MOST_BITS: Final = 8
DEVICE_FP8: Final = "fp8"
"""In ``spec`` and ``kv_dtype`` of a manifest: the 8-bit float of the device. No element has this name."""


@dataclass(frozen=True)
class Element(ABC):
    """One number format.

    ``name`` is what specs are written with (``nf4@float32:1x64``): lower-case letters, digits and underscores. ``bits``
    is 1 to 8; elements of up to four bits are stored two to a byte, others one by one. ``storage`` is the torch dtype
    of the codes that ``encode`` returns and of elements that are stored one by one. ``limit`` is the magnitude beyond
    which ``encode`` saturates, where codes reach further. Raises ValueError for other values.
    """

    name: str
    bits: int
    storage: str = "uint8"
    limit: float = field(default=inf, kw_only=True)

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= _MOST_BITS:
            raise ValueError(f"element {self.name!r} has {self.bits} bits; 1 to {_MOST_BITS} can be stored")
        if not self.name or set(self.name) & set("@+/:*?"):
            raise ValueError(f"element name {self.name!r} cannot be written in a spec; use letters, digits and _")
        if self.name == DEVICE_FP8:
            raise ValueError(f"element name {self.name!r} stands for the device's 8-bit float; choose another")

    @abstractmethod
    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [...] in ``dtype`` of ``codes`` [...], on their device; changes nothing.

        ``codes`` are as ``encode`` returns them, or uint8 with the element in the low bits and the
        others zero. Their strides may be any.
        """

    @abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the codes [...], in ``storage``, of the values nearest to float32 ``x`` [...]; changes nothing.

        Either neighbour of a midpoint is right. A value outside the range of ``values`` gets the nearest end of it.
        """

    @property
    def packing(self) -> str:
        """The packing of elements in a matrix: ``nibbles`` (two to a byte) up to four bits, else ``none``."""
        return "nibbles" if self.bits <= 4 else "none"

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The finite values that codes stand for, up to ``limit``, each once, ascending."""
        import torch

        codes = _stored_as(self.storage, torch.arange(1 << self.bits, dtype=torch.uint8))
        found = self.decode(codes, torch.float64).tolist()
        return tuple(sorted({value + 0.0 for value in found if abs(value) < inf and abs(value) <= self.limit}))

    @cached_property
    def largest(self) -> float:
        """The largest magnitude that a scale maps to: 127 of int8, not 128, so that both signs reach as far."""
        low, high = self.values[0], self.values[-1]
        return min(high, -low) if low < 0 else high

    @property
    def takes_zero_point(self) -> bool:
        """Whether the values are consecutive whole numbers, so that ``(q - zero_point) * scale`` covers any range."""
        first = self.values[0]
        return all(value == first + index for index, value in enumerate(self.values))


@dataclass(frozen=True)
class TableElement(Element):
    """An element given by the value of each code; a code's place in ``table`` is the code. Such is NF4.

    A value that lies in the middle of two goes to the one with the even code.
    """

    table: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.table) != 1 << self.bits:
            codes, values = 1 << self.bits, len(self.table)
            raise ValueError(f"element {self.name!r} of {self.bits} bits has {codes} codes, its table {values} values")

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.tensor(self.table, dtype=dtype, device=codes.device)[codes.int()]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        codes, bounds = self._ascending
        places = torch.bucketize(x.contiguous(), torch.tensor(bounds, device=x.device), out_int32=True)
        return torch.tensor(codes, dtype=torch.uint8, device=x.device)[places]

    @cached_property
    def _ascending(self) -> tuple[list[int], list[float]]:
        """The codes in the order of their values; the upper bound (included) of what rounds to each but the last."""
        import torch

        by_value = {value + 0.0: code for code, value in reversed(list(enumerate(self.table)))}
        codes = [by_value[value] for value in self.values]
        middles = torch.tensor([(a + b) / 2 for a, b in pairwise(self.values)], dtype=torch.float64)
        bounds = middles.float()
        below = torch.nextafter(bounds, torch.full_like(bounds, float("-inf")))
        is_odd = torch.tensor([code % 2 == 1 for code in codes[:-1]])
        bounds = torch.where((bounds > middles) | ((bounds == middles) & is_odd), below, bounds)
        return codes, bounds.tolist()


@dataclass(frozen=True)
class _Integer(Element):
    """Whole numbers in two's complement, or without a sign."""

    storage: str = "int8"

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        import torch

        if self.bits < _MOST_BITS and self.storage == "int8":
            sign = 1 << (self.bits - 1)
            return (((codes & (2 * sign - 1)) ^ sign).to(torch.int8) - sign).to(dtype)
        return _stored_as(self.storage, codes).to(dtype)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        count = 1 << self.bits
        low = -count // 2 if self.storage == "int8" else 0
        return x.round().clamp_(low, low + count - 1).to(getattr(torch, self.storage))


@dataclass(frozen=True)
class _TorchFloat(Element):
    """A float8 dtype of torch's; ``name`` and ``storage`` are its name, and ``limit`` is always given."""

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _stored_as(self.storage, codes).to(dtype)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        return x.clamp(-self.limit, self.limit).to(getattr(torch, self.storage))


@dataclass(frozen=True)
class _E2M1(Element):
    """OCP Microscaling Formats (MX) specification 1.0, section 5.3.3: bit 3 is the sign."""

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        import torch

        magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        values = torch.tensor([*magnitudes, *(-value for value in magnitudes)], dtype=dtype, device=codes.device)
        return values[codes.int()]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        # Codes are 0.5 apart up to 2, 1 up to 4, then 2: the least of three lines, each rounded to even codes.
        most = x.abs().clamp_max_(6.0).nan_to_num_(6.0)
        codes = (most * 2).round_().clamp_max_(most.round().add_(2)).clamp_max_(most.mul_(0.5).round_().add_(4))
        return codes.to(torch.uint8).bitwise_or_(x.signbit().view(torch.uint8).mul_(8))


def _stored_as(storage: str, codes: torch.Tensor) -> torch.Tensor:
    """Bytes of uint8 as elements of ``storage``; what has another dtype already is returned as it is."""
    import torch

    return codes.view(getattr(torch, storage)) if codes.dtype == torch.uint8 else codes


INT8, UINT8 = _Integer("int8", 8, "int8"), _Integer("uint8", 8, "uint8")
INT4, UINT4 = _Integer("int4", 4, "int8"), _Integer("uint4", 4, "uint8")
UINT2, INT3 = _Integer("uint2", 2, "uint8"), _Integer("int3", 3, "int8")
INT5, UINT5, INT6 = _Integer("int5", 5, "int8"), _Integer("uint5", 5, "uint8"), _Integer("int6", 6, "int8")
FLOAT8_E4M3FN = _TorchFloat("float8_e4m3fn", 8, "float8_e4m3fn", limit=448.0)
FLOAT8_E4M3FNUZ = _TorchFloat("float8_e4m3fnuz", 8, "float8_e4m3fnuz", limit=224.0)
"""Reaches 240. Rounding stops at 224, half of 448: with a scale of ``float8_e4m3fn``, doubled, both saturate alike."""
FLOAT8_E5M2 = _TorchFloat("float8_e5m2", 8, "float8_e5m2", limit=57344.0)
FLOAT8_E5M2FNUZ = _TorchFloat("float8_e5m2fnuz", 8, "float8_e5m2fnuz", limit=57344.0)
FLOAT4_E2M1 = _E2M1("float4_e2m1", 4)
IQ4_NL = TableElement("iq4_nl", 4, table=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
"""The code book of GGUF's types IQ4_NL and IQ4_XS (ggml's ``kvalues_iq4nl``)."""

BUILT_IN: Final[dict[str, Element]] = {
    element.name: element
    for element in (
        INT8,
        UINT8,
        INT4,
        UINT4,
        UINT2,
        INT3,
        INT5,
        UINT5,
        INT6,
        IQ4_NL,
        FLOAT8_E4M3FN,
        FLOAT8_E4M3FNUZ,
        FLOAT8_E5M2,
        FLOAT8_E5M2FNUZ,
        FLOAT4_E2M1,
    )
}
"""Core's own elements: a spec need only name them. Core offers each in the family ``element``, as plugins do theirs."""


def unknown_element(name: str, known: Iterable[str] = BUILT_IN) -> UnknownNameError:
    """Return the error for an element that nobody has defined, with what its author must do."""
    return UnknownNameError(
        "element",
        name,
        known,
        f"To add one: offer a hardpoint_plugin_api.Element named {name!r} in the family 'element' of a plugin's "
        "hardpoint.toml, and write specs of it as QuantSpec.of(ELEMENT, scales=...), not by its name alone.",
    )
