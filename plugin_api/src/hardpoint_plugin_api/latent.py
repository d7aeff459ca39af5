"""The backend of latent attention: cache layout + store + plan + forward, over latents that all heads share.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) caches, for each token, one latent vector, from which the
keys and values of all heads are made, and one rotated key that all heads share. Backends see the absorbed form: the
matrix that makes keys of latents was multiplied into the queries, and the one that makes values is multiplied onto the
result afterwards. So a head's score is ``scale * (q_latent . latent + q_rope . rope_key)``, and its result is the
weighted sum of latents. Queries read all earlier positions of their request, and their own; in sparse attention
(DeepSeek-V3.2), those of them that a list names.

Shapes use T scheduled tokens, H query heads, L latent size, R rope size, K positions of a list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hardpoint_plugin_api.attention import AttentionMetadata, StepPlanner
from hardpoint_plugin_api.cache import CacheLayout, CacheSpec, Plane
from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.elements import BUILT_IN
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import Feature, LatentWorkload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LatentSpec:
    """The constants of a group of latent attention layers, given at construction.

    ``num_heads`` H query heads are on this rank. The latent [``latent_size``] and the rotated key [``rope_size``] of a
    token are on every rank. ``scale`` multiplies scores. ``top_k``: each query reads at most that many positions, those
    that ``LatentCall.indices`` lists; None: all up to its own.
    """

    num_heads: int
    latent_size: int
    rope_size: int
    scale: float
    dtype: str
    kv_dtype: str
    block_size: int
    top_k: int | None = None

    @property
    def cache_spec(self) -> CacheSpec:
        """The planes ``latent`` [L] and ``rope_key`` [R] of each token, kept for the whole sequence.

        Where ``kv_dtype`` has 8 bits, a latent has a scale (scaling ``row``), and ``rope_key`` is in ``dtype``: rotated
        keys are few elements, and rounding them costs more accuracy than rounding latents.
        """
        if self.kv_dtype in BUILT_IN:
            latent = Plane("latent", (self.latent_size,), self.kv_dtype, "row")
            return CacheSpec((latent, Plane("rope_key", (self.rope_size,), self.dtype)))
        return CacheSpec(
            (
                Plane("latent", (self.latent_size,), self.kv_dtype),
                Plane("rope_key", (self.rope_size,), self.kv_dtype),
            )
        )

    @property
    def features(self) -> frozenset[Feature]:
        """The workload features that are in use."""
        return frozenset() if self.top_k is None else frozenset({Feature.INDEX_LISTS})

    def workload(self) -> LatentWorkload:
        """Return the workload by which a backend is selected for this group."""
        return LatentWorkload(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            num_heads=self.num_heads,
            latent_size=self.latent_size,
            rope_size=self.rope_size,
            block_size=self.block_size,
            top_k=self.top_k,
            features=self.features,
        )


@dataclass(frozen=True, slots=True)
class LatentStoreCall:
    """The arguments of ``LatentBackend.store``.

    ``latent`` [T, L] and ``rope_key`` [T, R] in the model's dtype. ``cache``: the views of the cache, by the names of
    the regions of ``layout``. ``slot_mapping`` int32 [T] as in AttentionBatch. Later versions add fields with defaults.
    """

    latent: torch.Tensor
    rope_key: torch.Tensor
    cache: dict[str, torch.Tensor]
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentCall:
    """The arguments of ``LatentBackend.forward``.

    ``q_latent`` [T, H, L] and ``q_rope`` [T, H, R]: this step's queries. ``latent`` [T, L] and ``rope_key`` [T, R]:
    what this step added to the cache, in the model's dtype. ``cache``: the views of the cache, by the names of the
    regions of ``layout``; it already holds these two, and a kernel may read them from either. ``metadata``: the result
    of ``plan`` for this step. ``out`` [T, H, L], in q_latent's dtype. Rows of tensors need not be contiguous.
    ``indices`` int32 [T, K], where ``LatentSpec.top_k`` is K: the positions of its own request that each query reads,
    none behind the query's own, in rising order; -1 fills the rest of a row. A query at position p has min(K, p + 1)
    positions. Later versions add fields with defaults.
    """

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    latent: torch.Tensor
    rope_key: torch.Tensor
    cache: dict[str, torch.Tensor]
    metadata: AttentionMetadata
    out: torch.Tensor
    indices: torch.Tensor | None = None


class LatentBackend(StepPlanner, ABC):
    """An implementation of latent attention: the target of a contribution of ``attention`` with ``of = "latent"``.

    Each layer has an instance; layers of equal spec and backend form a group, whose first layer plans for all.
    ``traceable`` is as in ExpertsKernel, for ``store`` and ``forward``.
    """

    layout: ClassVar[CacheLayout]
    traceable: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        self.ctx, self.spec = ctx, spec

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: no reason."""
        return []

    @property
    def cache_spec(self) -> CacheSpec:
        """The cache that the layout stores."""
        return self.spec.cache_spec

    @abstractmethod
    def store(self, call: LatentStoreCall) -> None:
        """Write ``latent`` and ``rope_key`` into ``cache`` at ``slot_mapping``. Mutates ``cache`` alone."""

    @abstractmethod
    def forward(self, call: LatentCall) -> None:
        """Compute attention of the queries over the cached latents. Mutates ``out`` alone, except its padding rows.

        Scores may have any magnitude, also very negative. A NaN among the values that a query reads must appear in its
        result.
        """
