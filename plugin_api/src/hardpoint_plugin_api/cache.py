"""The KV and state cache: the pool owns pages of bytes, a layout says what the bytes mean.

A page holds ``block_size`` tokens of one layer. Page 0 is the null page: padding rows write to it, nothing reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NULL_PAGE = 0


@dataclass(frozen=True)
class CacheSpec:
    """What one layer caches per token: ``num_kv_heads`` keys and values of ``head_size`` elements of ``dtype``.

    ``window`` is the sliding window in tokens (the newest included), or None for full attention: keys further back
    are never read again.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    window: int | None = None


@dataclass(frozen=True)
class Region:
    """One named part of a page: its byte offset, bytes, and the shape of its view without the page axis."""

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


class CacheLayout(ABC):
    """How a backend lays a page out. Stateless; ``name`` is what manifests refer to as ``layout``.

    Invariant, which conformance checks: ``to_logical`` after ``from_logical`` on the same views and pages returns the
    same values.
    """

    name: str
    alignment: int = 64

    @abstractmethod
    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        """The parts of one page, in order of offset; gaps are padding."""

    def page_bytes(self, spec: CacheSpec, block_size: int) -> int:
        """Bytes of one page, a multiple of ``alignment``."""
        end = max(r.offset + r.nbytes for r in self.regions(spec, block_size))
        return -(-end // self.alignment) * self.alignment

    def views(self, buffer: torch.Tensor, pages: int, spec: CacheSpec, block_size: int) -> dict[str, torch.Tensor]:
        """Named views of ``buffer`` (uint8 [pages * page_bytes]), each [pages, *region.shape]; no copy."""
        import torch

        rows = buffer.view(pages, self.page_bytes(spec, block_size))
        return {
            r.name: rows[:, r.offset : r.offset + r.nbytes].view(getattr(torch, r.dtype)).view(pages, *r.shape)
            for r in self.regions(spec, block_size)
        }

    @abstractmethod
    def to_logical(self, views: dict[str, torch.Tensor], pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy ``pages`` (int64 [n]) out as keys and values, each [n, block_size, num_kv_heads, head_size]."""

    @abstractmethod
    def from_logical(
        self, views: dict[str, torch.Tensor], pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys and values, shaped as ``to_logical`` returns them, into ``pages``. Mutates the views."""
