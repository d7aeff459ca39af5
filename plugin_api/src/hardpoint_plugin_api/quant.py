"""Numeric specs: the meaning of the numbers in a tensor, independent of the program that wrote them.

A quantized value is ``w = (q - zero_point) * scale_1 * scale_2 * ... + min_1 * min_2 * ...``; two 4-bit elements share
a byte, the first in the low bits. Minima are there only with the flag ``min``, one for each scale, in its format.

A spec is written ``ELEMENT@FORMAT:BLOCK@FORMAT:BLOCK+FLAG+FLAG``, one ``@FORMAT:BLOCK`` for each level of scales:
``int4@bfloat16:1x128+asym``, ``float8_e4m3fn@float32:128x128``, ``int8@float32:row+dynamic``. BLOCK is ``all`` (one
scale for the whole tensor), ``row`` (one for each output channel, or token) or ROWSxCOLUMNS. Flags: ``asym`` (there is
a zero point), ``dynamic`` (scales are computed per call), ``permuted`` (columns of a group are not neighbours), ``min``
(there are minima: GGUF's ``Q4_K`` is ``uint4@uint8:1x32@float16:1x256+min``). A pair is written ``WEIGHT/ACTIVATION``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from hardpoint_plugin_api.elements import BUILT_IN, Element, unknown_element

_SHAPES = {(-1, -1): "all", (1, -1): "row"}
_PATTERN = re.compile(r"(?P<element>[^@+/]+)(?P<scales>(@[^@+/:]+:[^@+/:]+)*)(?P<flags>(\+[^@+/:]+)*)\Z")


@dataclass(frozen=True)
class Scale:
    """One level of scales: its format and the block of (rows, columns) that shares one value; -1 means all.

    ``format`` is a torch dtype's name. tensor (-1, -1); output channel or token (1, -1); group (1, G); tile (128, 128).
    """

    format: str
    block: tuple[int, int]

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the number of scales, (rows, columns), of a matrix ``rows`` x ``columns``; the last block may be
        smaller.
        """
        (n, k) = self.block
        return (1 if n == -1 else -(-rows // n), 1 if k == -1 else -(-columns // k))

    def __str__(self) -> str:
        return f"{self.format}:{_SHAPES.get(self.block) or f'{self.block[0]}x{self.block[1]}'}"


@dataclass(frozen=True)
class QuantSpec:
    """The storage of one operand of a product: element, packing, levels of scales, zero point, minima.

    ``element``: a torch dtype's name for a plain spec, else an element's name; names of built-in elements suffice,
    others are given by ``QuantSpec.of``, which sets ``definition``. ``packing``: ``none``, or ``nibbles`` for two
    elements per byte along a row, the first in the low bits, as elements of up to four bits are stored. ``static``:
    scales come with the checkpoint (always so for weights) instead of being computed per call. ``permuted``: the group
    of each column is looked up (GPTQ's ``desc_act``). ``minimum``: each level of scales has minima beside it, whose
    product is added. Specs that are written alike are equal.
    """

    element: str
    packing: str = "none"
    scales: tuple[Scale, ...] = ()
    zero_point: bool = False
    static: bool = True
    permuted: bool = False
    minimum: bool = False
    definition: Element | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.definition is None:
            object.__setattr__(self, "definition", BUILT_IN.get(self.element))
        if self.definition is not None and self.packing == "none":
            object.__setattr__(self, "packing", self.definition.packing)

    @classmethod
    def of(
        cls,
        element: Element,
        scales: Iterable[Scale],
        *,
        zero_point: bool = False,
        static: bool = True,
        permuted: bool = False,
        minimum: bool = False,
    ) -> QuantSpec:
        """Return the spec of ``element`` (built in, or a plugin's) with at least one level of ``scales``."""
        levels = tuple(scales)
        return cls(element.name, element.packing, levels, zero_point, static, permuted, minimum, definition=element)

    @property
    def number_format(self) -> Element:
        """The definition of the element. Raises UnknownNameError for a mere name that is not built in."""
        if self.definition is None:
            raise unknown_element(self.element)
        return self.definition

    @property
    def storage(self) -> str:
        """The torch dtype of a stored matrix; uint8 for packed elements."""
        if self.packing == "nibbles":
            return "uint8"
        return self.element if self.definition is None else self.definition.storage

    @property
    def is_plain(self) -> bool:
        """True for a spec without scales: stored elements are the numbers themselves."""
        return not self.scales

    @property
    def per_byte(self) -> int:
        """The number of elements in one unit of storage: two for nibbles, else one."""
        return 2 if self.packing == "nibbles" else 1

    @property
    def zero_point_dtype(self) -> str:
        """Zero points are integers of the elements' signedness."""
        return "uint8" if self.element.startswith("uint") else "int8"

    def __str__(self) -> str:
        flags = [("asym", self.zero_point), ("dynamic", not self.static), ("permuted", self.permuted)]
        flags.append(("min", self.minimum))
        scales = "".join(f"@{scale}" for scale in self.scales)
        return self.element + scales + "".join(f"+{name}" for name, on in flags if on)


def written_pair(pair: tuple[QuantSpec, QuantSpec]) -> str:
    """``weight/activation``."""
    return f"{pair[0]}/{pair[1]}"


def check_pattern(pattern: str) -> None:
    """Raise ValueError unless ``pattern`` is a spec, or a pair of them, in the written form, or ``*``."""
    for part in pattern.split("/"):
        if part != "*" and not _PATTERN.match(part):
            raise ValueError(
                f"{pattern!r} is no spec: write ELEMENT@FORMAT:BLOCK+FLAG, for linear and experts two of them with a "
                "slash between, as in 'int4@bfloat16:1x128+asym/bfloat16' or 'int8@*:row/*'"
            )


def matches(pattern: str, specs: tuple[QuantSpec, ...]) -> bool:
    """Whether each of ``specs`` meets its part of ``pattern``.

    ``*`` alone means any specs, and a part that is ``*`` any spec. In others ``*`` and ``?`` stand for characters
    within one element, format or block; the number of scales is the pattern's, and the flags are exactly the
    pattern's (``+*``: any).
    """
    parts = ["*"] * len(specs) if pattern == "*" else pattern.split("/")
    return len(parts) == len(specs) and all(map(_matches, parts, specs))


@lru_cache(maxsize=4096)
def _matches(pattern: str, spec: QuantSpec) -> bool:
    if pattern == "*":
        return True
    wanted, actual = SpecPattern.parse(pattern), SpecPattern.parse(str(spec))
    return (
        _fits(actual.element, wanted.element)
        and len(wanted.scales) == len(actual.scales)
        and all(
            _fits(part, glob)
            for scale, globs in zip(actual.scales, wanted.scales, strict=True)
            for part, glob in zip(scale, globs, strict=True)
        )
        and (actual.flags == wanted.flags or "*" in wanted.flags)
    )


@dataclass(frozen=True)
class SpecPattern:
    """A written spec in parts, each of which may hold the wildcards ``*`` and ``?``: element, scales and flags.

    ``scales`` are (format, block) for each level.
    """

    element: str
    scales: tuple[tuple[str, str], ...] = ()
    flags: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> SpecPattern:
        """Parse the weight or the activation side of a pattern ``WEIGHT/ACTIVATION``, such as ``int4@float16:1x128``.

        Raises ValueError for text that is no spec, ``*`` alone among it.
        """
        found = _PATTERN.match(text)
        if found is None:
            raise ValueError(f"{text!r} is no spec: write ELEMENT@FORMAT:BLOCK+FLAG")
        scales = (scale.split(":") for scale in found["scales"].split("@")[1:])
        flags = frozenset(found["flags"].split("+")[1:])
        return cls(found["element"], tuple((format_, block) for format_, block in scales), flags)


def _fits(text: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(text, glob.replace("[", "[[]"))
