"""The attention backend: cache layout + store + plan + forward.

``store`` and ``forward`` are on the token path: they select nothing and, after warm-up, allocate nothing on
platforms whose graph engine records addresses. ``plan`` runs once per step and attention group, outside capture.

Shapes use T scheduled tokens, N requests, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from hardpoint_plugin_api.cache import CacheLayout, CacheSpec, Scaling, Span
from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.elements import BUILT_IN
from hardpoint_plugin_api.platform import StepLimits
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import AttentionWorkload, Feature, Phase

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionSpec:
    """What is constant for an attention group, given when the backend is built.

    ``window`` and ``chunk`` are those of ``Span``. ``soft_cap`` c replaces scores s by c * tanh(s / c), before the
    mask. ``sinks`` says that each query head has an extra learned logit in its softmax's denominator; ``alibi`` that
    each has a slope m, which adds m * (key - query). Their values are given to ``set_head_constants``, since they are
    weights. ``static_cache_scales`` says that a cache of 8-bit elements has one scale for keys and one for values,
    given to ``set_cache_scales``; without them, the layout keeps a scale for each token and head.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    dtype: str
    kv_dtype: str
    block_size: int
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    static_cache_scales: bool = False

    @property
    def span(self) -> Span:
        """Which earlier positions a query reads."""
        return Span(self.window, self.chunk)

    @property
    def cache_spec(self) -> CacheSpec:
        """What this group caches per token."""
        scaling: Scaling = "none"
        if self.kv_dtype in BUILT_IN:
            scaling = "static" if self.static_cache_scales else "row"
        return CacheSpec.keys_values(self.num_kv_heads, self.head_size, self.kv_dtype, self.span, scaling)

    @property
    def features(self) -> frozenset[Feature]:
        """The workload features in use."""
        used = [
            (Feature.SLIDING_WINDOW, self.window is not None),
            (Feature.CHUNKED_LOCAL, self.chunk is not None),
            (Feature.SOFT_CAP, self.soft_cap is not None),
            (Feature.SINKS, self.sinks),
            (Feature.ALIBI, self.alibi),
            (Feature.STATIC_CACHE_SCALES, self.static_cache_scales),
        ]
        return frozenset(feature for feature, on in used if on)

    def workload(self) -> AttentionWorkload:
        """The request that selects a backend for this group."""
        return AttentionWorkload(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
            features=self.features,
        )


@dataclass(frozen=True)
class AttentionBatch:
    """One step's batch. Requests are ordered decodes first; tokens of one request are adjacent and in order.

    Device arrays, int32: ``query_start`` [N+1], ``seq_lens`` [N] (tokens in the cache after this step), ``block_table``
    [N, blocks] (page ids), ``slot_mapping`` [T] (page * block_size + offset; padding rows carry slots of the null
    page). ``query_start_host`` is an exact host copy, and so is ``seq_lens_host`` where ``exact_lengths`` says so;
    otherwise, while drafts are verified that nobody has counted yet, no request is longer than it says. Only planners
    that say ``exact_lengths = False`` are given bounds. All arrays are written before the model's first layer begins: a
    kernel that is launched before the one before it has ended may read them, though not yet what that one writes.

    Only the blocks that the request's queries read, by the group's ``Span``, are its own. Entries before and behind
    them may name the null page or somebody else's page, whose content, NaN included, must not reach any result.

    ``graph_key`` names the graph that the step is for: batches of equal key have the same arrays at the same
    addresses, equally many queries for each request, and a block table as wide as the longest sequence. Requests that
    are mere padding stand last: their tokens are the first of a sequence in the null page. None: a step that runs
    eagerly.

    ``any_shape`` batches, which have a key, too, hold any prompts and decodes: what they hold stands in the device's
    arrays alone. Those of the host describe one request with all T tokens, which takes as many launches and as large
    ones as any. T includes tokens behind the last request, whose results nobody reads, and N requests without a token,
    behind the others. Only backends of the grade ANY are given one.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    num_decodes: int
    graph_key: Hashable = None
    any_shape: bool = False
    exact_lengths: bool = True

    @property
    def num_requests(self) -> int:
        """N."""
        return len(self.seq_lens_host)

    @property
    def num_tokens(self) -> int:
        """T, padding excluded."""
        return self.query_start_host[-1]

    def state_pages(self, block_size: int) -> torch.Tensor:
        """The page of each request's newest token, int64 [N]: where a cache of states (``Latest``) has its state.

        Computed on the device. The state of a request whose tokens are all in this step is not written yet.
        """
        blocks = (self.seq_lens - 1) // block_size
        return self.block_table.gather(1, blocks[:, None].long())[:, 0].long()


class CaptureGrade(IntEnum):
    """What batches a backend's ``forward`` may be captured for: none, one query for each request, equally many, any.

    ANY means ``any_shape`` batches: which queries are whose is read on the device.
    """

    NEVER = 0
    SINGLE_TOKEN = 1
    UNIFORM = 2
    ANY = 3


@dataclass(frozen=True)
class NumericConventions:
    """Typed numeric conventions; a mismatch is converted by core or refused, never guessed."""

    lse_base: str = "e"
    causal_alignment: str = "bottom-right"


@dataclass
class AttentionMetadata:
    """What ``plan`` hands to ``forward``; a backend subclasses it. Valid until the next ``plan`` of the same group.

    ``token`` is the compatibility token, hashable: a step whose token differs from the captured one must not replay
    its graph. Another is prepared for it.
    """

    batch: AttentionBatch
    token: object = None


@dataclass(frozen=True, slots=True)
class StoreCall:
    """The arguments of ``AttentionBackend.store``.

    ``k`` and ``v`` [T, K, D] in the model's dtype; ``cache`` the views that the backend's ``layout`` gives of the
    cache; ``slot_mapping`` int32 [T] as in AttentionBatch. Later versions add fields with defaults.
    """

    k: torch.Tensor
    v: torch.Tensor
    cache: dict[str, torch.Tensor]
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of ``AttentionBackend.forward``.

    ``q`` [T, H, D], ``k`` and ``v`` [T, K, D] are this step's, in the model's dtype. ``cache``, the views that the
    backend's ``layout`` gives of the cache, already holds ``k`` and ``v``; a kernel may read them from either.
    ``metadata`` is what ``plan`` returned for the step. ``out`` [T, H, D] is in q's dtype. Later versions add fields
    with defaults.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: dict[str, torch.Tensor]
    metadata: AttentionMetadata
    out: torch.Tensor


class StepPlanner:
    """The planner of steps for layers that use a cache: an attention backend, or this class itself.

    It is enough by itself for a layer that reads nothing but the batch, on the device alone. ``capture`` says what of
    such a layer's work on its cache may be captured. ``exact_lengths`` says whether anything is taken from the batch's
    ``seq_lens_host`` for which bounds would not do; with such a planner, drafts are verified one step at a time.
    """

    capture: ClassVar[CaptureGrade] = CaptureGrade.NEVER
    exact_lengths: ClassVar[bool] = True

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Prepare one step on the host. Default: hand the batch on.

        Where ``capture`` is not NEVER and the batch has a ``graph_key``, the layer's work is captured with the metadata
        of one step, and replayed for every later step of that key whose metadata has an equal ``token``; the metadata
        of those is dropped. So for equal key and token: everything that the work reads on the device lies in the
        batch's own arrays, or in buffers that ``plan`` allocates once and writes anew each time; and whatever it takes
        from the host (host arrays, numbers of launches and of splits, which kernel runs) follows from key and token
        alone. What else must change, such as a grid's size, goes into the token; rounded up, so that there are few.
        """
        return AttentionMetadata(batch)

    def grade(self, phase: Phase, tokens: int) -> CaptureGrade:
        """The steps of this phase and size that may be captured. Default: ``capture``, for all of them."""
        return self.capture

    def step_limits(self) -> StepLimits:
        """The limits of a step. Default: none."""
        return StepLimits()


class AttentionBackend(StepPlanner, ABC):
    """One backend. An instance is built per attention layer; layers of equal spec and backend form a group.

    ``plan`` is called once per step on the first layer of a group, and its metadata is handed to all of the group.
    ``traceable`` is as in ExpertsKernel, for ``store`` and ``forward``.
    """

    layout: ClassVar[CacheLayout]
    traceable: ClassVar[bool] = False
    conventions: ClassVar[NumericConventions] = NumericConventions()

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        self.ctx, self.spec = ctx, spec
        self.sinks: torch.Tensor | None = None
        self.alibi_slopes: torch.Tensor | None = None
        self.cache_scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Say what data cannot; called once, after import. Default: nothing to add."""
        return []

    @property
    def cache_spec(self) -> CacheSpec:
        """What the layout is asked to store; an adapter that pads heads stores more than the model's own spec."""
        return self.spec.cache_spec

    def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
        """Take the per-head constants, each float32 [H], once weights are loaded."""
        self.sinks, self.alibi_slopes = sinks, alibi_slopes

    def set_cache_scales(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take the static scales of keys and values, each float32 [1]: cached is what they divide, rounded."""
        self.cache_scales = k, v

    @abstractmethod
    def store(self, call: StoreCall) -> None:
        """Write the call's ``k`` and ``v`` into its ``cache`` at its slots. Mutates ``cache`` alone."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Prepare one step on the host, for ``forward``; see StepPlanner."""

    @abstractmethod
    def forward(self, call: AttentionCall) -> None:
        """Attend the call's ``q`` to the cached keys and values. Mutates ``out`` alone, all but its padding rows.

        Scores may be of any height, also far below zero. A NaN among the values that a query reads is in its result.
        """
