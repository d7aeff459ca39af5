"""The attention backend: cache layout, and the methods ``store``, ``plan`` and ``forward``.

``store`` and ``forward`` run in every step: they choose nothing, and after warm-up they allocate nothing on platforms
whose captured graphs keep addresses. ``plan`` runs once per step and attention group, outside of graph capture.

Shapes use T scheduled tokens, N requests, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from hardpoint_plugin_api.cache import NVFP4, CacheLayout, CacheSpec, Scaling, Span
from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.elements import BUILT_IN, FLOAT4_E2M1
from hardpoint_plugin_api.platform import StepLimits
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import AttentionWorkload, Feature, Phase

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of a group of attention layers, given at construction.

    ``window`` and ``chunk`` are as in ``Span``. ``soft_cap`` c replaces scores s by c * tanh(s / c), before the mask.
    ``sinks``: each query head has a learned logit that is added to its softmax's denominator. ``alibi``: each query
    head has a slope m, and m * (key position - query position) is added to scores. Sinks and slopes are weights:
    ``set_head_constants`` passes their values. ``static_cache_scales``: an 8-bit cache has one scale for keys and one
    for values, passed by ``set_cache_scales``; otherwise the layout stores one for each token and head. In a cache of
    ``kv_dtype`` NVFP4 groups of elements have scales, and these two multiply them; otherwise they are 1.
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
        """The earlier positions that a query reads."""
        return Span(self.window, self.chunk)

    @property
    def cache_spec(self) -> CacheSpec:
        """The CacheSpec of one layer of this group: planes ``k`` and ``v``, dtype, retention and scaling."""
        scaling: Scaling = "none"
        dtype = self.kv_dtype
        if dtype == NVFP4:
            dtype, scaling = FLOAT4_E2M1.name, "group"
        elif dtype in BUILT_IN:
            scaling = "static" if self.static_cache_scales else "row"
        return CacheSpec.keys_values(self.num_kv_heads, self.head_size, dtype, self.span, scaling)

    @property
    def features(self) -> frozenset[Feature]:
        """The workload features that are in use."""
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
        """Return the workload by which a backend is selected for this group."""
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
    """The batch of one step. Decode requests come first; the tokens of a request are adjacent and in order.

    Device arrays, int32: ``query_start`` [N+1]; ``seq_lens`` [N], the tokens in the cache after this step;
    ``block_table`` [N, blocks], page ids; ``slot_mapping`` [T], page * block_size + offset, where padding rows have
    slots of the null page. All arrays are written before the model's first layer begins: a kernel that is launched
    while its predecessor still runs may read them, but not yet the predecessor's results.

    Host arrays: ``query_start_host`` is an exact copy. ``seq_lens_host`` is an exact copy if ``exact_lengths``; else an
    upper bound for each request, since drafts that are being verified are not counted yet. Only planners with
    ``exact_lengths = False`` are given bounds.

    The block table is valid for the blocks that the request's queries read, by the group's ``Span``. Other entries may
    name the null page or a page of another request; its content, NaN included, must not reach any result.

    ``graph_key`` identifies the captured graph that the step is for; None for an eager step. Batches of equal key have
    the same arrays at the same addresses, equally many queries per request, and a block table as wide as the longest
    sequence. Padding requests come last; their tokens are the first of a sequence in the null page.

    ``any_shape`` batches also have a key, and hold any mix of prompts and decodes; only backends of the grade ANY are
    given one. Their true layout is only on the device. The host arrays are a worst case for sizing launches: one
    request with all T tokens. T includes tokens after the last request, whose results are not read, and N includes
    requests without tokens, after the others.
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
        """N, the number of requests."""
        return len(self.seq_lens_host)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens without padding."""
        return self.query_start_host[-1]

    def state_pages(self, block_size: int) -> torch.Tensor:
        """Return the page of each request's newest token, int64 [N]: the page of its state, in a cache of retention
        ``Latest``.

        Computed on the device. A request whose tokens are all in this step has no state there yet.
        """
        blocks = (self.seq_lens - 1) // block_size
        return self.block_table.gather(1, blocks[:, None].long())[:, 0].long()


class CaptureGrade(IntEnum):
    """The batches that ``forward`` may be captured for in a graph. Each grade includes the ones before it.

    NEVER: none. SINGLE_TOKEN: one query per request (decode). UNIFORM: equally many queries per request (verification
    of drafts). ANY: any mix of prompts and decodes (``any_shape`` batches), whose layout the kernel reads on the
    device.
    """

    NEVER = 0
    SINGLE_TOKEN = 1
    UNIFORM = 2
    ANY = 3


@dataclass
class AttentionMetadata:
    """The result of ``plan``, passed to ``forward``; a backend may subclass it. Valid until the next ``plan`` of its
    group.

    ``token`` is hashable. A captured graph is replayed only for steps whose token equals the captured one; for another
    token another graph is captured.
    """

    batch: AttentionBatch
    token: object = None


@dataclass(frozen=True, slots=True)
class StoreCall:
    """The arguments of ``AttentionBackend.store``.

    ``k`` and ``v`` [T, K, D]: this step's keys and values, in the model's dtype. ``cache``: the views of the cache, by
    the names of the regions of ``layout``. ``slot_mapping`` int32 [T]: the slot of each token, as in AttentionBatch.
    Later versions add fields with defaults.
    """

    k: torch.Tensor
    v: torch.Tensor
    cache: dict[str, torch.Tensor]
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of ``AttentionBackend.forward``.

    ``q`` [T, H, D], ``k`` and ``v`` [T, K, D]: this step's queries, keys and values, in the model's dtype. ``cache``:
    the views of the cache, by the names of the regions of ``layout``; ``k`` and ``v`` are already stored in it, and a
    kernel may read them from either. ``metadata``: the result of ``plan`` for this step. ``out`` [T, H, D], in q's
    dtype. Later versions add fields with defaults.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: dict[str, torch.Tensor]
    metadata: AttentionMetadata
    out: torch.Tensor


class StepPlanner:
    """Prepares steps for layers that use a cache. Attention backends are planners.

    This class itself suffices for a layer that reads nothing but the batch's device arrays. ``capture``: which batches
    the layer's work on its cache may be captured for. ``exact_lengths``: ``plan`` needs exact ``seq_lens_host``, not
    upper bounds; with such a planner, a step waits until the previous step's drafts are counted. ``keeps_drafts``: of a
    cache of retention ``Latest``, a step may begin behind any of the last 1 + k tokens of the step before it, where k
    is the most drafts of a request; without it, models with such a layer are refused drafts. ``hardpoint conform``
    tries this claim of layers and models, with k of 1 and 3.
    """

    capture: ClassVar[CaptureGrade] = CaptureGrade.NEVER
    exact_lengths: ClassVar[bool] = True
    keeps_drafts: ClassVar[bool] = False

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Prepare one step, on the host. Default: metadata that hold the batch alone.

        Rules for graph capture, where ``capture`` is not NEVER and the batch has a ``graph_key``: work is captured with
        the metadata of one step, and replayed for later steps of equal key and equal ``token``, whose own metadata is
        dropped. So everything that the work reads on the device must lie in the batch's arrays, or in buffers that
        ``plan`` allocates once and rewrites each time. Everything that it takes from the host (host arrays, numbers of
        launches and of splits, choice of kernel) must follow from key and token. Other values that must vary, such as a
        grid's size, belong into the token, rounded up so that few tokens occur.
        """
        return AttentionMetadata(batch)

    def grade(self, phase: Phase, tokens: int) -> CaptureGrade:
        """Return the grade for steps of this phase and number of tokens. Default: ``capture``."""
        return self.capture

    def step_limits(self) -> StepLimits:
        """Return the limits of a step. Default: none."""
        return StepLimits()


class AttentionBackend(StepPlanner, ABC):
    """An attention implementation. Each attention layer has an instance; layers of equal spec and backend form a group.

    ``plan`` is called once per step, on the group's first layer; all layers of the group get its metadata.
    ``traceable`` is as in ExpertsKernel, for ``store`` and ``forward``.
    """

    layout: ClassVar[CacheLayout]
    traceable: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        self.ctx, self.spec = ctx, spec
        self.sinks: torch.Tensor | None = None
        self.alibi_slopes: torch.Tensor | None = None
        self.cache_scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: no reason."""
        return []

    @property
    def cache_spec(self) -> CacheSpec:
        """The cache that the layout stores. An adapter that pads heads stores more than the model's own spec."""
        return self.spec.cache_spec

    def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
        """Take the constants of each head, float32 [H], after weights are loaded."""
        self.sinks, self.alibi_slopes = sinks, alibi_slopes

    def set_cache_scales(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take the scales of all keys and of all values, float32 [1] each: the cache holds numbers divided by them,
        rounded.
        """
        self.cache_scales = k, v

    @abstractmethod
    def store(self, call: StoreCall) -> None:
        """Write ``k`` and ``v`` into ``cache`` at ``slot_mapping``. Mutates ``cache`` alone."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Prepare one step for ``forward``, on the host; see StepPlanner."""

    @abstractmethod
    def forward(self, call: AttentionCall) -> None:
        """Compute attention of ``q`` over the cached keys and values. Mutates ``out`` alone, except its padding rows.

        A request's queries are its newest tokens: the last one reads every key, the one before it all but the last key
        (a causal mask that is aligned to the bottom right corner of the scores).
        Scores may have any magnitude, also very negative. A NaN among the values that a query reads must appear in its
        result.
        """
