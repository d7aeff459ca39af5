"""Kinds of attention that the attention benchmark measures: sizes, what a batch reads and computes, calls, and a peer.

Axes: T tokens of a step, S tokens of a request, H query heads, K KV heads, D head size, L latent size, R rope size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from hardpoint.attention.phases import PhasedBackend, PhasedLatentBackend
from hardpoint.bench.device_timer import Run
from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import (
    GROUP_SIZE,
    NVFP4,
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    LatentBackend,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
    StoreCall,
)


@dataclass(frozen=True)
class Requests:
    """``count`` requests alike: ``query`` new tokens at the end of ``total``."""

    count: int
    query: int
    total: int

    @property
    def num_reads(self) -> int:
        """Pairs of a query and a key that it reads, of one request, if it reads all of them."""
        return self.query * (self.total - self.query) + self.query * (self.query + 1) // 2


@dataclass(frozen=True)
class Kind(ABC):
    """One kind, with the sizes to be measured. ``backend``: its backends' class; ``joined`` makes one of several."""

    of: ClassVar[str]
    backend: ClassVar[Callable[..., Any]]
    joined: ClassVar[Callable[..., Any]]
    spec: Any

    def reads(self, requests: Requests) -> tuple[int, int]:
        """Of one request: pairs of a query and a key that it reads, and keys that any query reads."""
        return requests.num_reads, requests.total

    @property
    @abstractmethod
    def key_bytes(self) -> int:
        """Bytes of a position in the cache."""

    @property
    @abstractmethod
    def query_bytes(self) -> int:
        """Bytes of a token's queries and results."""

    @property
    @abstractmethod
    def pair_flops(self) -> int:
        """Multiplications and additions of one query with one key, in all heads."""

    @abstractmethod
    def call(
        self, backend: Any, tokens: int, device: torch.device
    ) -> Callable[[dict[str, torch.Tensor], torch.Tensor, AttentionMetadata], Run]:
        """Random queries and keys of ``tokens``. The result stores keys in a cache, and returns a call over it."""

    @abstractmethod
    def dense(self, one: Requests, device: torch.device, dtype: torch.dtype) -> Run:
        """Torch's own attention over as much, keys and values side by side."""


@dataclass(frozen=True)
class CausalKind(Kind):
    """Grouped-query attention."""

    of = "causal"
    backend = AttentionBackend
    joined = PhasedBackend
    spec: AttentionSpec

    def reads(self, requests: Requests) -> tuple[int, int]:
        window = self.spec.window
        read = min(requests.total, (window or requests.total) + requests.query - 1)
        return requests.num_reads - (0 if window is None else _beyond(requests, window)), read

    @property
    def key_bytes(self) -> int:
        elements = 2 * self.spec.num_kv_heads * self.spec.head_size
        if self.spec.kv_dtype == NVFP4:
            return elements // 2 + elements // GROUP_SIZE
        return elements * dtype_of(self.spec.kv_dtype).itemsize

    @property
    def query_bytes(self) -> int:
        return 2 * self.spec.num_heads * self.spec.head_size * dtype_of(self.spec.dtype).itemsize

    @property
    def pair_flops(self) -> int:
        return 4 * self.spec.num_heads * self.spec.head_size

    def call(
        self, backend: Any, tokens: int, device: torch.device
    ) -> Callable[[dict[str, torch.Tensor], torch.Tensor, AttentionMetadata], Run]:
        spec = self.spec
        q, k, v = (
            torch.randn(tokens, heads, spec.head_size, device=device).to(dtype_of(spec.dtype))
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        out = torch.empty_like(q)

        def over(cache: dict[str, torch.Tensor], slots: torch.Tensor, metadata: AttentionMetadata) -> Run:
            backend.store(StoreCall(k, v, cache, slots))
            return partial(backend.forward, AttentionCall(q, k, v, cache, metadata, out))

        return over

    def dense(self, one: Requests, device: torch.device, dtype: torch.dtype) -> Run:
        spec = self.spec
        q = torch.randn(one.count, spec.num_heads, one.query, spec.head_size, device=device).to(dtype)
        k, v = torch.randn(2, one.count, spec.num_kv_heads, one.total, spec.head_size, device=device).to(dtype)
        return _torch_attention(one, q, k, v)


@dataclass(frozen=True)
class LatentKind(Kind):
    """Latent attention in its absorbed form."""

    of = "latent"
    backend = LatentBackend
    joined = PhasedLatentBackend
    spec: LatentSpec

    @property
    def key_bytes(self) -> int:
        return (self.spec.latent_size + self.spec.rope_size) * dtype_of(self.spec.kv_dtype).itemsize

    @property
    def query_bytes(self) -> int:
        return self.spec.num_heads * self._elements * dtype_of(self.spec.dtype).itemsize

    @property
    def pair_flops(self) -> int:
        return 2 * self.spec.num_heads * self._elements

    @property
    def _elements(self) -> int:
        return 2 * self.spec.latent_size + self.spec.rope_size

    def call(
        self, backend: Any, tokens: int, device: torch.device
    ) -> Callable[[dict[str, torch.Tensor], torch.Tensor, AttentionMetadata], Run]:
        spec, dtype = self.spec, dtype_of(self.spec.dtype)
        q_latent, q_rope = (
            torch.randn(tokens, spec.num_heads, size, device=device).to(dtype)
            for size in (spec.latent_size, spec.rope_size)
        )
        keys = [torch.randn(tokens, size, device=device).to(dtype) for size in (spec.latent_size, spec.rope_size)]
        out = torch.empty_like(q_latent)

        def over(cache: dict[str, torch.Tensor], slots: torch.Tensor, metadata: AttentionMetadata) -> Run:
            backend.store(LatentStoreCall(keys[0], keys[1], cache, slots))
            return partial(backend.forward, LatentCall(q_latent, q_rope, keys[0], keys[1], cache, metadata, out))

        return over

    def dense(self, one: Requests, device: torch.device, dtype: torch.dtype) -> Run:
        spec, size = self.spec, self.spec.latent_size + self.spec.rope_size
        q = torch.randn(one.count, spec.num_heads, one.query, size, device=device).to(dtype)
        k = torch.randn(one.count, 1, one.total, size, device=device).to(dtype)
        if one.query == 1:
            # All heads read the same keys, so they are rows of one product: torch would copy the keys for each head.
            q = q.transpose(1, 2)
            return partial(torch.nn.functional.scaled_dot_product_attention, q, k, k[..., : spec.latent_size])
        return _torch_attention(one, q, k, k[..., : spec.latent_size])


def _torch_attention(one: Requests, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    mask = None
    if 1 < one.query < one.total:
        mask = torch.ones(one.query, one.total, dtype=torch.bool, device=q.device).tril(one.total - one.query)
    return partial(
        torch.nn.functional.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=one.query == one.total > 1,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _beyond(requests: Requests, window: int) -> int:
    """Pairs of one request that a window hides."""
    first, last = requests.total - requests.query + 1, requests.total  # keys up to and with each query
    hidden = [max(0, first - window), max(0, last - window)]
    count = min(requests.query, hidden[1])
    return (hidden[1] + max(hidden[0], 1 if hidden[1] else 0)) * count // 2
