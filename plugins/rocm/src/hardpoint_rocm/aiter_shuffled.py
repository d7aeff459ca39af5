"""AITER's assembly paged attention, over a cache whose elements lie in the order in which matrix units read them.

Keys of 16 bytes of a head's elements, values of 16 bytes of tokens: the layout that AITER calls "asm". Elements have 16
bits, or 8 with a scale for each token and head. ``--rocm.kv-layout shuffle`` asks for it.

Axes: P pages, B tokens of a page, x elements of 16 bytes, T tokens, N requests, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.nn.functional import pad

from hardpoint.attention.phases import sub_batch
from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    AttentionWorkload,
    BuildContext,
    CacheLayout,
    CacheSpec,
    DeviceInfo,
    Reason,
    Region,
    StoreCall,
    write_rounded,
)
from hardpoint_rocm.aiter_attention import flash_attention, group_reasons, is_whole, longest, readable
from hardpoint_rocm.aiter_library import function, reasons_against

_UNIT_BYTES = 16


class ShuffledLayout(CacheLayout):
    """A page: keys [K, D/x, B, x], values [K, B/x, D, x]; then scales of 8-bit elements, float32 [K, B] each."""

    name = "aiter_shuffled"

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        """See CacheLayout. The planes are ``k`` and ``v``."""
        regions: list[Region] = []
        heads, size = spec["k"].shape
        unit = _UNIT_BYTES // dtype_of(spec["k"].dtype).itemsize
        shapes: dict[str, tuple[int, ...]] = {
            "k": (heads, size // unit, block_size, unit),
            "v": (heads, block_size // unit, size, unit),
        }
        wanted = [(name, shape, spec[name].dtype) for name, shape in shapes.items()]
        wanted += [(f"{name}_scale", (heads, block_size), "float32") for name in "kv" if spec[name].scaling == "row"]
        end = 0
        for name, shape, dtype in wanted:
            nbytes = math.prod(shape) * dtype_of(dtype).itemsize
            regions.append(Region(name, end, nbytes, shape, dtype))
            end += nbytes
        return tuple(regions)

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """See CacheLayout."""
        found = {}
        for name, order in (("k", (0, 3, 1, 2, 4)), ("v", (0, 2, 4, 1, 3))):
            view, scale = views[name], views.get(f"{name}_scale")
            elements = _raw(view)[pages].view(view.dtype).permute(order)
            elements = elements.flatten(3) if name == "k" else elements.flatten(1, 2)
            if scale is not None:
                elements = elements.float() * scale[pages].transpose(1, 2).unsqueeze(-1)
            found[name] = elements
        return found

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """See CacheLayout. Elements of 8 bits are rounded with the scales that just fit."""
        block = views["k"].shape[3]
        slots = (pages[:, None] * block + torch.arange(block, device=pages.device)).flatten()
        self.write(views, slots, *(planes[name].flatten(0, 1) for name in "kv"))

    def write(self, views: Mapping[str, torch.Tensor], slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write ``k``, ``v`` [T, K, D] at ``slots``, int64 [T]. Mutates the views."""
        _, heads, units, block, unit = views["k"].shape
        pages, offsets = slots // block, slots % block
        for name, x in (("k", k), ("v", v)):
            into, scales = _raw(views[name]), views.get(f"{name}_scale")
            rows, row_scales = _placed(x, views[name].dtype, scales is not None)
            if scales is not None and row_scales is not None:
                scales[pages, :, offsets] = row_scales
            if name == "k":
                into[pages, :, :, offsets] = rows.view(len(slots), heads, units, unit)
            else:
                into[pages, :, offsets // unit, :, offsets % unit] = rows


@dataclass
class _DenseScales:
    """Scales of all pages without what stands between them: AITER's kernel knows no stride. One for each group.

    Truth is in the pages, where copies and transfers of pages find it; the pages of a step's decodes are copied here.
    It has 1/32 of the bytes of one layer's cache, and is allocated in the first step that decodes.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    def of(self, cache: Mapping[str, torch.Tensor], pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of keys and values, float32 [P, K, B], valid on ``pages`` until the next call."""
        if self.k is None or self.v is None or self.k.shape != cache["k_scale"].shape:
            self.k, self.v = (
                torch.zeros_like(cache[f"{n}_scale"], memory_format=torch.contiguous_format) for n in "kv"
            )
        self.k[pages] = cache["k_scale"][pages]
        self.v[pages] = cache["v_scale"][pages]
        return self.k, self.v


@dataclass(frozen=True)
class _Continued:
    """A request whose keys are read from the cache: its rows among the step's, its pages (int64), and for flash
    attention where its queries and keys begin, and how many there are."""

    rows: slice
    pages: torch.Tensor
    starts: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]


@dataclass
class ShuffledMetadata(AttentionMetadata):
    """``decodes``: with adjacent rows of the block table, which names ``pages`` (int64). ``prompts``: all other
    requests, where they begin in this step and the cache holds their numbers as they are; else each of ``continued``.
    """

    decodes: AttentionBatch | None = None
    pages: torch.Tensor | None = None
    scales: _DenseScales = field(default_factory=_DenseScales)
    prompts: AttentionBatch | None = None
    continued: Sequence[_Continued] = ()


class AiterShuffledAttention(AttentionBackend):
    """Decodes by ``pa_fwd_asm``, prompts by flash attention.

    For the latter, keys and values are first copied from the cache into plain order, one request at a time: a copy is
    as large as the longest request. The same holds for all prompts over 8-bit elements.
    """

    layout: ClassVar[ShuffledLayout] = ShuffledLayout()
    exact_lengths: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        self._scales = _DenseScales()
        factor = spec.scale * math.sqrt(spec.head_size)  # the kernel divides by the root itself
        self._factor = None if math.isclose(factor, 1.0, rel_tol=1e-6) else factor

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what AITER's kernels do not take, and an AITER that has other functions."""
        found, dtype, own = group_reasons(workload), workload.kv_dtype, workload.dtype
        if dtype in ("float16", "bfloat16") and dtype != own:
            message = "the cache's dtype is neither the queries' nor of 8 bits"
            found.append(Reason("kv-dtype", message, wanted=dtype, supported=f"{own}, fp8"))
        return [*found, *reasons_against("pa_fwd_asm", "flash_attn_varlen_func")]

    def store(self, call: StoreCall) -> None:
        """See AttentionBackend."""
        self.layout.write(call.cache, call.slot_mapping.long(), call.k, call.v)

    def plan(self, batch: AttentionBatch) -> ShuffledMetadata:
        """See AttentionBackend. Nothing waits for the device."""
        planned, split = ShuffledMetadata(batch, scales=self._scales), batch.num_decodes
        if split:
            decodes = sub_batch(batch, 0, split)
            width = -(-max(decodes.seq_lens_host) // self.spec.block_size)
            planned.decodes = replace(decodes, block_table=decodes.block_table[:, :width].contiguous())
            planned.pages = planned.decodes.block_table.flatten().long()
        if split < batch.num_requests:
            prompts = sub_batch(batch, split, batch.num_requests)
            if is_whole(prompts) and self.spec.kv_dtype == self.spec.dtype:  # else keys are what the cache holds
                planned.prompts = prompts
            else:
                planned.continued = [self._continued(batch, i) for i in range(split, batch.num_requests)]
        return planned

    def _continued(self, batch: AttentionBatch, i: int) -> _Continued:
        rows, keys = slice(*batch.query_start_host[i : i + 2]), batch.seq_lens_host[i]
        starts = batch.query_start[i : i + 2] - batch.query_start[i], pad(batch.seq_lens[i : i + 1], (1, 0))
        pages = batch.block_table[i, : -(-keys // self.spec.block_size)].long()
        return _Continued(rows, pages, starts, (rows.stop - rows.start, keys))

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend."""
        planned = call.metadata
        assert isinstance(planned, ShuffledMetadata)
        if planned.decodes is not None:
            self._decode(call, planned, planned.decodes)
        if (prompts := planned.prompts) is not None:
            rows = slice(planned.batch.num_tokens - prompts.num_tokens, planned.batch.num_tokens)
            starts = prompts.query_start, prompts.query_start
            flash_attention(self, call.q[rows], call.k[rows], call.v[rows], starts, longest(prompts), call.out[rows])
        for one in planned.continued:
            cached = self.layout.to_logical(call.cache, one.pages)
            k, v = (cached[name].flatten(0, 1).to(call.q.dtype) for name in "kv")
            flash_attention(self, call.q[one.rows], k, v, one.starts, one.longest, call.out[one.rows])

    def _decode(self, call: AttentionCall, planned: ShuffledMetadata, batch: AttentionBatch) -> None:
        q, cache = readable(call.q[: batch.num_requests]), call.cache
        k_scale = v_scale = None
        if "k_scale" in cache:
            assert planned.pages is not None
            k_scale, v_scale = planned.scales.of(cache, planned.pages)
        function("pa_fwd_asm")(
            Q=q if self._factor is None else q * self._factor,
            K=cache["k"],
            V=cache["v"],
            block_tables=batch.block_table,
            context_lens=batch.seq_lens,
            block_tables_stride0=batch.block_table.stride(0),
            K_QScale=k_scale,
            V_QScale=v_scale,
            out_=call.out[: batch.num_requests],
        )


def _placed(x: torch.Tensor, dtype: torch.dtype, scaled: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x`` [T, K, D] as elements of ``dtype``; with the scales of its rows, float32 [T, K], where they are ``scaled``.

    Elements of 8 bits are returned as bytes.
    """
    if not scaled:
        return x.to(dtype), None
    rows = {"x": torch.empty(x.shape, dtype=dtype, device=x.device)}
    rows["x_scale"] = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    write_rounded(rows, "x", (torch.arange(len(x), device=x.device),), x, None)
    return _raw(rows["x"]), rows["x_scale"]


def _raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of 8-bit elements, which torch indexes on every device."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
