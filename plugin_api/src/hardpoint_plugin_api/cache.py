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
NVFP4 = "nvfp4"
"""The ``kv_dtype`` of a cache with scaling ``group``: vLLM and TensorRT-LLM give it the same name."""
GROUP_SIZE = 16
"""Neighbouring elements that share a scale where scaling is ``group``."""


class Retention(ABC):
    """How long cached data is needed: ``Span`` for tokens, ``Latest`` for a state. Caches of equal retention share
    pages.
    """

    per_sequence: ClassVar[bool] = False
    """Whether a page holds one state of a sequence, which steps change in place, instead of tokens."""

    @abstractmethod
    def first(self, position: int) -> int:
        """Return the oldest position that a step starting at ``position`` reads. Later steps never read older
        positions.
        """

    @abstractmethod
    def most_cached(self, num_tokens: int) -> int | None:
        """Return the most cached tokens that ``num_tokens`` of one request read or write in a step; None: no limit."""


@dataclass(frozen=True)
class Latest(Retention):
    """A recurrent state: one per sequence, updated by every step. Examples: linear attention, a causal convolution.

    A step reads the state after the previous tokens from the page of its newest token's block, and overwrites it in
    place with the state after its own tokens. At the first token of a sequence the page's content is undefined. A state
    at the end of a block, which prefix caching may give to other requests, is copied to another page before it is
    changed.
    """

    per_sequence: ClassVar[bool] = True

    def first(self, position: int) -> int:
        """Return the position of the token whose state is read."""
        return max(0, position - 1)

    def most_cached(self, num_tokens: int) -> int | None:
        """Return 1: a step holds one state."""
        return 1


@dataclass(frozen=True)
class Span(Retention):
    """The earlier positions that a query reads; by default all of them. One of ``window`` and ``chunk`` may be set.

    With a sliding ``window`` (arXiv:2004.05150) a query at position p reads p-window+1 .. p. With chunked-local
    attention, as in Llama 4, it reads the positions up to p of its own ``chunk``, the one numbered p // chunk.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ConfigError(f"attention has a window ({self.window}) or a chunk ({self.chunk}), not both")

    def first(self, position: int) -> int:
        """Return the oldest position that a query at ``position`` reads. Later queries never read older positions."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position - position % self.chunk

    def most_cached(self, num_tokens: int) -> int | None:
        """Return the most cached tokens that ``num_tokens`` of one request read or write in a step; None: no limit."""
        size = self.window or self.chunk
        return None if size is None else size - 1 + num_tokens

    def hides(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the mask, bool: True where a query must not read a key.

        ``query`` and ``key`` are positions: integer tensors that broadcast.
        """
        hidden = key > query
        if self.window is not None:
            hidden = hidden | (query - key >= self.window)
        if self.chunk is not None:
            hidden = hidden | (key // self.chunk != query // self.chunk)
        return hidden


Scaling = Literal["none", "row", "static", "group"]


@dataclass(frozen=True)
class Plane:
    """One named tensor of a cache, such as its keys: ``shape`` and ``dtype`` for each token, or for the state of a
    sequence.

    ``scaling`` says how stored elements become numbers. ``none``: they are the numbers. ``row``: the layout stores one
    float32 scale for each row along the last axis (for keys [K, D], one per token and head); numbers are elements times
    scale. ``static``: one scale for the whole plane, which the backend is given and the layout does not store.
    ``group``: elements are ``float4_e2m1``, and the layout stores one float8_e4m3fn scale for GROUP_SIZE neighbours
    along the last axis, whose size is a multiple of that; numbers are elements times scale, times a float32 for the
    whole plane where the backend is given one. That is NVFP4, as FlashInfer's ``nvfp4_kv_quantize`` has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scaling: Scaling = "none"

    @property
    def numel(self) -> int:
        """The number of elements per token, or of a state."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CacheSpec:
    """The cache of one layer: its planes, with unique names, and how long their content is needed.

    A page that holds nothing that later steps read, by ``retention``, is freed for other requests.
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
        """Return the shape of ``plane`` in a page: [block_size, *plane.shape], or plane.shape for a state."""
        return plane.shape if self.retention.per_sequence else (block_size, *plane.shape)

    def __getitem__(self, name: str) -> Plane:
        """Return the plane ``name``. Raises KeyError for an unknown name."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        raise KeyError(f"the cache has no plane {name!r}; it has {', '.join(p.name for p in self.planes)}")


@dataclass(frozen=True)
class Region:
    """One named part of a page: byte offset, number of bytes, and the shape of its view without the page axis."""

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


class CacheLayout(ABC):
    """A backend's arrangement of a cache in pages of bytes. Stateless; ``layout`` in manifests refers to its ``name``.

    ``PlainLayout``, ``ScaledLayout`` and ``GroupScaledLayout`` serve most planes.

    Invariant, which the conformance kit checks: ``to_logical`` after ``from_logical`` on the same views and pages
    returns the same values, as precisely as the layout's elements and scales can hold them.
    """

    name: str
    alignment: int = 64

    @abstractmethod
    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        """Return the parts of one page in order of offset; gaps between them are padding."""

    def page_bytes(self, spec: CacheSpec, block_size: int) -> int:
        """Return the bytes of one page, a multiple of ``alignment``."""
        end = max(r.offset + r.nbytes for r in self.regions(spec, block_size))
        return -(-end // self.alignment) * self.alignment

    def views(
        self, buffer: torch.Tensor, pages: int, spec: CacheSpec, block_size: int, page_bytes: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return named views of ``buffer`` (uint8 [pages * page_bytes]), each [pages, *region.shape]. No copy.

        ``page_bytes`` is larger than the layout's own where layers with larger pages share the buffer: each page is
        then padded at its end. It is a multiple of every element's size.
        """
        import torch

        rows = buffer.view(pages, page_bytes or self.page_bytes(spec, block_size))
        return {
            r.name: rows[:, r.offset : r.offset + r.nbytes].view(getattr(torch, r.dtype)).view(pages, *r.shape)
            for r in self.regions(spec, block_size)
        }

    @abstractmethod
    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copy ``pages`` (int64 [n]) out: for each plane, by name, a tensor [n, *spec.page_shape(plane)].

        A plane with scaling is returned in float32; a scale for the whole plane is not applied.
        """

    @abstractmethod
    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """Write ``planes``, shaped as ``to_logical`` returns them, to pages number ``pages``. Mutates the views."""
