"""Where a kernel's tensors lie while it is tried: between guard bands, at odd offsets, far apart, in poisoned memory.

Poison is the byte 0xFF: a NaN in every floating-point format, -1 in every integer. So a read beside an input shows in
the results, and a write there shows in the bands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xFF
_BAND = 1024
"""Bytes before and behind each tensor; a multiple of every element's size and of common vector widths."""
_FAR = 2**31 + 2**16
"""Elements between the first and the last row of a tensor whose offsets do not fit in 32 bits."""


class Placement(Enum):
    """How a tensor lies. Mutated inputs and outputs lie as drawn, between bands; others may lie less comfortably."""

    AS_DRAWN = "as drawn"
    OFFSET = "offset"  # one element behind an aligned address
    APART = "apart"  # rows of the first axis with a gap in between, as slices of a merged projection have
    FAR = "far"  # offsets past 2**31 elements


class NotEnoughMemoryError(Exception):
    """A check needs more memory than there is; the message says how much."""


def place(x: torch.Tensor, device: torch.device, placement: Placement = Placement.AS_DRAWN) -> torch.Tensor:
    """Return a copy of ``x`` on ``device``: its strides, between bands of poison, and poison in the gaps."""
    strides, offset = list(x.stride()), 0
    if placement is Placement.OFFSET:
        offset = 1
    if placement is Placement.APART and x.dim() >= 2 and x.shape[0] > 1:
        strides = [*torch.empty(x.shape, device="meta").stride()]
        strides[0] += 11
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) if x.numel() else 0
    nbytes = 2 * _BAND + (offset + span) * x.element_size()
    raw = torch.full((-(-nbytes // 16) * 16,), POISON, dtype=torch.uint8, device=device)
    return raw.view(x.dtype).as_strided(x.shape, strides, _BAND // x.element_size() + offset).copy_(x)


def place_far(x: torch.Tensor, device: torch.device, free_bytes: int) -> torch.Tensor:
    """Return a copy of ``x``, which has two rows or more, whose last row begins past 2**31 elements.

    Only the rows are written: on hosts that commit memory as it is touched, it takes next to none. Raises
    NotEnoughMemoryError where ``free_bytes`` would not hold it all.
    """
    inner = list(torch.empty(x.shape, device="meta").stride())[1:]
    apart = -(-_FAR // (x.shape[0] - 1))
    far = empty(apart * (x.shape[0] - 1) + x[0].numel(), x.dtype, device, free_bytes)
    return far.as_strided(x.shape, (apart, *inner)).copy_(x)


def empty(numel: int, dtype: torch.dtype, device: torch.device, free_bytes: int) -> torch.Tensor:
    """Uninitialised memory for ``numel`` elements; raises NotEnoughMemoryError where ``free_bytes`` do not hold it."""
    nbytes = numel * dtype.itemsize
    text = f"{nbytes / 2**30:.1f} GiB are needed, {free_bytes / 2**30:.1f} GiB are free"
    if nbytes > free_bytes * 0.8:
        raise NotEnoughMemoryError(text)
    try:
        return torch.empty(numel, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's out-of-memory errors are of this kind on every device
        raise NotEnoughMemoryError(f"{text}: {error}") from error


def far_pages(page_elements: int) -> int:
    """How many pages it takes until one begins past 2**31 elements."""
    return -(-_FAR // page_elements) + 2


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors, and all of the storages that they are views of, with poison."""
    for x in tensors:
        raw = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        raw.fill_(POISON)


def soil_allocator(like: Iterable[torch.Tensor]) -> None:
    """Take and give back poisoned blocks of the sizes of ``like``, so that fresh memory holds no right answer."""
    blocks = [torch.full((4, max(1, x.nbytes)), POISON, dtype=torch.uint8, device=x.device) for x in like]
    singles = [[row.clone() for row in block] for block in blocks]
    del blocks, singles


class PoisonedAllocations(TorchDispatchMode):
    """While it is on, memory that torch hands out uninitialised is full of poison."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own hook: otherwise a first call imports its compiler, which takes a second or two."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(("aten::empty", "aten::new_empty")) and isinstance(result, torch.Tensor):
            poison([result])
        return result


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, neither empty, lie in the same allocation."""
    return bool(a.numel() and b.numel()) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, in shape and dtype too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))
