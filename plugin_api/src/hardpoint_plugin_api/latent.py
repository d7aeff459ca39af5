"""The backend of latent attention: cache layout + store + plan + forward, over latents that all heads share.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) caches, for each token, one latent vector, from which the
keys and values of all heads are made, and one rotated key that all heads share. Backends see the absorbed form: the
matrix that makes keys of latents was multiplied into the queries, and the one that makes values is multiplied onto the
result afterwards. So a head's score is ``scale * (q_latent . latent + q_rope . rope_key)``, and its result is the
weighted sum of latents. Queries read all earlier positions of their request, and their own.

Shapes use T scheduled tokens, H query heads, L latent size, R rope size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hardpoint_plugin_api.attention import AttentionMetadata, StepPlanner
from hardpoint_plugin_api.cache import CacheLayout, CacheSpec, Plane
from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import LatentWorkload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LatentSpec:
    """The constants of a group of latent attention layers, given when the backend is built.

    ``num_heads`` H query heads are on this rank; the latent [``latent_size``] and the rotated key [``rope_size``] of a
    token are on every rank. ``scale`` multiplies scores.
    """

    num_heads: int
    latent_size: int
    rope_size: int
    scale: float
    dtype: str
    kv_dtype: str
    block_size: int

    @property
    def cache_spec(self) -> CacheSpec:
        """The planes ``latent`` [L] and ``rope_key`` [R] of each token, kept as long as their request lives."""
        return CacheSpec(
            (
                Plane("latent", (self.latent_size,), self.kv_dtype),
                Plane("rope_key", (self.rope_size,), self.kv_dtype),
            )
        )

    def workload(self) -> LatentWorkload:
        """The request that selects a backend for this group."""
        return LatentWorkload(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            num_heads=self.num_heads,
            latent_size=self.latent_size,
            rope_size=self.rope_size,
            block_size=self.block_size,
        )


@dataclass(frozen=True, slots=True)
class LatentStoreCall:
    """The arguments of ``LatentBackend.store``.

    ``latent`` [T, L] and ``rope_key`` [T, R] in the model's dtype; ``cache`` the views that the backend's ``layout``
    gives of the cache; ``slot_mapping`` int32 [T] as in AttentionBatch. Later versions add fields with defaults.
    """

    latent: torch.Tensor
    rope_key: torch.Tensor
    cache: dict[str, torch.Tensor]
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentCall:
    """The arguments of ``LatentBackend.forward``.

    ``q_latent`` [T, H, L] and ``q_rope`` [T, H, R] are this step's queries, ``latent`` [T, L] and ``rope_key`` [T, R]
    what it added to the cache, in the model's dtype. ``cache``, the views that the backend's ``layout`` gives of the
    cache, already holds these two; a kernel may read them from either. ``metadata`` is what ``plan`` returned for the
    step. ``out`` [T, H, L] is in q_latent's dtype. Rows of tensors may lie apart. Later versions add fields with
    defaults.
    """

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    latent: torch.Tensor
    rope_key: torch.Tensor
    cache: dict[str, torch.Tensor]
    metadata: AttentionMetadata
    out: torch.Tensor


class LatentBackend(StepPlanner, ABC):
    """One backend of latent attention: the target of a contribution of ``attention`` with ``of = "latent"``.

    An instance is built per layer; layers of equal spec and backend form a group, whose first layer plans for all.
    ``traceable`` is as in ExpertsKernel, for ``store`` and ``forward``.
    """

    layout: ClassVar[CacheLayout]
    traceable: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        self.ctx, self.spec = ctx, spec

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Say what data cannot; called once, after import. Default: nothing to add."""
        return []

    @property
    def cache_spec(self) -> CacheSpec:
        """The cache that the layout stores."""
        return self.spec.cache_spec

    @abstractmethod
    def store(self, call: LatentStoreCall) -> None:
        """Write the call's ``latent`` and ``rope_key`` into its ``cache`` at its slots. Mutates ``cache`` alone."""

    @abstractmethod
    def forward(self, call: LatentCall) -> None:
        """Attend the call's queries to the cached latents. Mutates ``out`` alone, all but its padding rows.

        Scores may be of any height, also far below zero. A NaN among what a query reads is in its result.
        """
