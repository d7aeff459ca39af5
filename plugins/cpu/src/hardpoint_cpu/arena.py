"""Memory that recorded steps use between their operators: blocks that are free again when no tensor is on them."""

from __future__ import annotations

import ctypes
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""
_SEGMENT_BYTES = 2 * 2**20


@dataclass(eq=False)
class Block:
    """``size`` bytes from ``start`` of a segment, uint8 [n]."""

    segment: torch.Tensor
    start: int
    size: int
    alive: bool = True

    @property
    def address(self) -> int:
        """The address of the block's first byte."""
        return self.segment.data_ptr() + self.start

    def bytes(self) -> torch.Tensor:
        """The block as uint8 [size]; this tensor does not keep the block from being used again."""
        return self.segment[self.start : self.start + self.size]


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its block; strides and offset in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, x: torch.Tensor) -> Geometry:
        """The geometry of a tensor whose block is its storage."""
        return cls(x.dtype, tuple(x.size()), tuple(x.stride()), int(x.storage_offset()))

    @property
    def nbytes(self) -> int:
        """Bytes from the block's first to the tensor's last element."""
        if 0 in self.size:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor on ``memory``, uint8 of at least ``nbytes``."""
        typed = memory.view(self.dtype)
        return typed.as_strided(self.size, self.stride, typed.storage_offset() + self.offset)


class Arena:
    """Hands out blocks, first fit, and grows by segments where none fits. It is used by one thread at a time.

    Tensors may die in any thread, and while the arena is at work: their blocks wait until the next call.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, list[tuple[int, int]]]] = []  # of each segment: its number, its free (start, end)
        self._segments: list[torch.Tensor] = []
        self._dead: deque[Block] = deque()
        self._live: dict[int, Block] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.numel() for segment in self._segments)

    def allocate(self, geometry: Geometry) -> tuple[torch.Tensor, Block]:
        """A tensor of at least one element. Its block is free again when its storage dies."""
        self.collect()
        block = self._take(-(-geometry.nbytes // _ALIGNMENT) * _ALIGNMENT)
        self._live[block.address] = block
        memory = (ctypes.c_uint8 * block.size).from_address(block.address)
        weakref.finalize(memory, self._dead.append, block).atexit = False
        return geometry.on(torch.frombuffer(memory, dtype=torch.uint8)), block

    def block_of(self, x: torch.Tensor) -> Block | None:
        """The block that a tensor lies in; None where it lies elsewhere."""
        if x.layout != torch.strided or x.device.type != "cpu":
            return None
        return self._live.get(x.untyped_storage().data_ptr())

    def collect(self) -> None:
        """Take back the blocks of tensors that died."""
        while self._dead:
            block = self._dead.popleft()
            block.alive = False
            del self._live[block.address]
            number = next(i for i, segment in enumerate(self._segments) if segment is block.segment)
            insort(self._free[number][1], (block.start, block.start + block.size))
            self._free[number] = (number, _merged(self._free[number][1]))

    def _take(self, size: int) -> Block:
        for number, holes in self._free:
            for i, (start, end) in enumerate(holes):
                if end - start >= size:
                    holes[i : i + 1] = [(start + size, end)] if end - start > size else []
                    return Block(self._segments[number], start, size)
        # The allocator aligns to 64 bytes, as _ALIGNMENT does.
        segment = torch.empty(max(size, _SEGMENT_BYTES), dtype=torch.uint8)
        self._free.append((len(self._segments), [(0, segment.numel())]))
        self._segments.append(segment)
        return self._take(size)


def _merged(holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours joined; ``holes`` ascend."""
    merged: list[tuple[int, int]] = []
    for start, end in holes:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
