"""Where in a safetensors file each tensor lies.

Format: https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header, the header, the tensors.
"""

from __future__ import annotations

import json
import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hardpoint.checkpoint.direct_reads import Span

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BOOL": "bool",
    "C64": "complex64",
}
"""The format's names of dtypes -> torch's."""

_LEAST = 1 << 20
"""Bytes of a tensor that are worth a read of their own."""


class Place(NamedTuple):
    """A tensor of ``shape``, whose bytes are those from ``start`` to ``end`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def span(self, rows: range | None) -> Span | None:
        """The bytes of ``rows``, of the first axis; None where they are few, or torch cannot have them as they lie."""
        kind = self._kind
        if not rows or not self.shape or kind is None or self.start % kind.itemsize:
            return None
        each = (self.end - self.start) // self.shape[0]
        if each * len(rows) < _LEAST:
            return None
        return Span(self.start + each * rows.start, each * len(rows), self.start, self.end - self.start)

    def tensor(self, memory: mmap.mmap, origin: int) -> torch.Tensor:
        """The tensor whose bytes begin at ``origin`` of ``memory``."""
        assert self._kind is not None
        return torch.frombuffer(memory, dtype=self._kind, count=prod(self.shape), offset=origin).view(self.shape)

    @property
    def _kind(self) -> torch.dtype | None:
        found = getattr(torch, DTYPES.get(self.dtype, ""), None)
        return found if isinstance(found, torch.dtype) else None


def places_in(path: Path) -> dict[str, Place]:
    """The place of each tensor. The file's header was read before, and is sound."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: Place(each["dtype"], tuple(each["shape"]), *(8 + length + at for at in each["data_offsets"]))
        for name, each in header.items()
    }
