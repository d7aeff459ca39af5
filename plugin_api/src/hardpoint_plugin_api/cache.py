"""The KV and state cache: the pool owns pages of bytes, a layout says what the bytes mean.

A page holds ``block_size`` tokens of one layer. Page 0 is the null page: padding rows write to it, and a block table
names it where a request holds nothing; what is read from it must not matter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from hardpoint_plugin_api.errors import ConfigError

if TYPE_CHECKING:
    import torch

NULL_PAGE = 0


@dataclass(frozen=True)
class Span:
    """Which earlier positions a query reads; by default all of them. One of ``window`` and ``chunk`` may be set.

    With a sliding ``window`` (arXiv:2004.05150) a query at position p reads p-window+1 .. p. With chunked-local
    attention, as in Llama 4, it reads the positions up to p of its own ``chunk``, the one numbered p // chunk.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ConfigError(f"attention has a window ({self.window}) or a chunk ({self.chunk}), not both")

    def first(self, position: int) -> int:
        """The oldest position that a query at ``position`` reads. Later queries never read what lies before it."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position - position % self.chunk

    def most_cached(self, num_tokens: int) -> int | None:
        """The most cached tokens that a step of ``num_tokens`` of one request reads or writes; None: all there are."""
        size = self.window or self.chunk
        return None if size is None else size - 1 + num_tokens

    def hides(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Where a query must not read a key, bool, from their positions: integer tensors that broadcast."""
        hidden = key > query
        if self.window is not None:
            hidden = hidden | (query - key >= self.window)
        if self.chunk is not None:
            hidden = hidden | (key // self.chunk != query // self.chunk)
        return hidden


Scaling = Literal["none", "row", "static"]


@dataclass(frozen=True)
class Plane:
    """One named part of what a cache holds of each token, such as its keys: a tensor of ``shape`` and ``dtype``.

    ``scaling`` says which numbers the elements stand for. ``none``: the elements themselves. ``row``: the layout keeps
    a float32 scale for each row along the last axis, so one for each token and head of keys [K, D]; numbers are
    elements times scale. ``static``: the backend is given one scale for the whole plane, which the layout does not
    hold.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scaling: Scaling = "none"

    @property
    def numel(self) -> int:
        """Elements of one token."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CacheSpec:
    """What one layer caches: its planes, with names of their own each, and how long they are needed.

    ``retention`` says which tokens later queries read: a page without any is given to another request.
    """

    planes: tuple[Plane, ...]
    retention: Span = Span()

    @classmethod
    def keys_values(
        cls,
        num_kv_heads: int,
        head_size: int,
        dtype: str,
        retention: Span = Span(),  # frozen
        scaling: Scaling = "none",
    ) -> Self:
        """The planes of attention over keys and values: ``k`` and ``v``, each [num_kv_heads, head_size]."""
        shape = num_kv_heads, head_size
        return cls(tuple(Plane(name, shape, dtype, scaling) for name in ("k", "v")), retention)

    def __getitem__(self, name: str) -> Plane:
        """The plane ``name``; raises KeyError where there is none."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        raise KeyError(f"the cache has no plane {name!r}; it has {', '.join(p.name for p in self.planes)}")


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

    ``PlainLayout`` and ``ScaledLayout`` serve any planes.

    Invariant, which conformance checks: ``to_logical`` after ``from_logical`` on the same views and pages returns the
    same values, as precisely as the layout's elements and scales hold them.
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

    def views(
        self, buffer: torch.Tensor, pages: int, spec: CacheSpec, block_size: int, page_bytes: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Named views of ``buffer`` (uint8 [pages * page_bytes]), each [pages, *region.shape]; no copy.

        ``page_bytes`` is larger than the layout's own where the buffer is shared with layers that need more: each page
        is padded at its end. It is a multiple of every element's size.
        """
        import torch

        rows = buffer.view(pages, page_bytes or self.page_bytes(spec, block_size))
        return {
            r.name: rows[:, r.offset : r.offset + r.nbytes].view(getattr(torch, r.dtype)).view(pages, *r.shape)
            for r in self.regions(spec, block_size)
        }

    @abstractmethod
    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copy ``pages`` (int64 [n]) out: each plane by its name, [n, block_size, *plane.shape].

        A plane with ``row`` or ``static`` scaling comes out in float32; static scales are left for the caller.
        """

    @abstractmethod
    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """Write every plane, shaped as ``to_logical`` returns it, into ``pages``. Mutates the views."""
