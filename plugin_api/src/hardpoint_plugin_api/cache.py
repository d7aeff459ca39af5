"""The KV and state cache: the pool owns pages of bytes, a layout says what the bytes mean.

A page holds ``block_size`` tokens of one cache, or the state of one sequence. Page 0 is the null page: padding rows
write to it, and a block table names it where a request holds nothing; what is read from it must not matter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from hardpoint_plugin_api.errors import ConfigError

if TYPE_CHECKING:
    import torch

NULL_PAGE = 0


class Retention(ABC):
    """How long what a cache holds is needed: a ``Span`` of tokens, or ``Latest``, a state. Equal ones share pages."""

    per_sequence: ClassVar[bool] = False
    """Whether a page holds one state of a sequence, which steps change in place, instead of tokens."""

    @abstractmethod
    def first(self, position: int) -> int:
        """The oldest position that a step from ``position`` on reads. Later steps never read what lies before it."""

    @abstractmethod
    def most_cached(self, num_tokens: int) -> int | None:
        """The most cached tokens that a step of ``num_tokens`` of one request reads or writes; None: all there are."""


@dataclass(frozen=True)
class Latest(Retention):
    """A state: what has become of all tokens so far, such as that of linear attention or of a convolution.

    A step finds the state after the tokens before it in the page of its newest token's block, and leaves there the
    state after its own, in place. The page holds garbage where the step begins the sequence. A state that another
    request may find, at the edge of a block, is copied to another page before it is changed.
    """

    per_sequence: ClassVar[bool] = True

    def first(self, position: int) -> int:
        """The position of the token after which the state is read."""
        return max(0, position - 1)

    def most_cached(self, num_tokens: int) -> int | None:
        """One token's: the state after it."""
        return 1


@dataclass(frozen=True)
class Span(Retention):
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
    """One named part of a cache, such as keys: of each token, or of a sequence, a tensor of ``shape`` and ``dtype``.

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
        """Elements of one token, or of one state."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CacheSpec:
    """The cache of one layer: its planes, each with a name of its own, and how long they are needed.

    ``retention`` says what later steps read: a page without any of it is given to another request.
    """

    planes: tuple[Plane, ...]
    retention: Retention = Span()

    @classmethod
    def keys_values(
        cls,
        num_kv_heads: int,
        head_size: int,
        dtype: str,
        retention: Retention = Span(),  # frozen
        scaling: Scaling = "none",
    ) -> Self:
        """The planes of attention over keys and values: ``k`` and ``v``, each [num_kv_heads, head_size]."""
        shape = num_kv_heads, head_size
        return cls(tuple(Plane(name, shape, dtype, scaling) for name in ("k", "v")), retention)

    def page_shape(self, plane: Plane, block_size: int) -> tuple[int, ...]:
        """The shape of ``plane`` in a page: [block_size, *plane.shape], or, of a state, plane.shape."""
        return plane.shape if self.retention.per_sequence else (block_size, *plane.shape)

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
        """Copy ``pages`` (int64 [n]) out: each plane by its name, [n, *spec.page_shape(plane)].

        A plane with ``row`` or ``static`` scaling comes out in float32; static scales are left for the caller.
        """

    @abstractmethod
    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """Write every plane, shaped as ``to_logical`` returns it, into ``pages``. Mutates the views."""
