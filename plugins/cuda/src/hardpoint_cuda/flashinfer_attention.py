"""Paged attention by FlashInfer: decodes through its kernel of Ampere with tensor cores, which reads at nearly the full
bandwidth, everything else through that of Hopper where there is one.

The cache has the layout "plain", is written by core's kernel, and can be shared with core's backends in one plan.

Axes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hardpoint.kernels.attention import TritonAttention
from hardpoint_cuda.flashinfer_builds import attention_build
from hardpoint_cuda.flashinfer_library import Kernel, reasons
from hardpoint_cuda.flashinfer_plan import StepPlanner
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    AttentionWorkload,
    BuildContext,
    CacheLayout,
    CaptureGrade,
    DeviceInfo,
    Feature,
    KernelBuild,
    PlainLayout,
    Reason,
    StoreCall,
)

WORKSPACE = "flashinfer_workspace"
_MOST_GROUP = 16
"""Query heads that share a KV head: more would take larger tiles, and workspace out of proportion."""
_ALIGNMENT = 16
"""Bytes that the kernels read at a time."""


@dataclass
class FlashInferMetadata(AttentionMetadata):
    """``parts``: planned wrappers, and the rows of the step that each serves."""

    parts: Sequence[tuple[Any, slice]] = ()


class FlashInferAttention(AttentionBackend):
    """See the top of this file."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.SINGLE_TOKEN

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        self._cache = TritonAttention(ctx, spec)
        self._decode, self._prefill = _kernels(ctx.device, spec.dtype, spec.head_size, spec.features)
        self._dependent_launch = _arch_number(ctx.device) >= 90
        self._planner: StepPlanner | None = None
        workspace = int(ctx.plugin_config("cuda")["flashinfer_workspace_mib"]) * 2**20
        ctx.resources.declare(WORKSPACE, workspace, scope="step")

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what no kernel takes, and say what FlashInfer lacks on this machine."""
        found = []
        heads, kv_heads, dtype, size = workload.num_heads, workload.num_kv_heads, workload.dtype, workload.head_size
        if workload.kv_dtype not in (None, dtype):
            message = "the cache's dtype is not the queries'"
            found.append(Reason("kv-dtype", message, wanted=workload.kv_dtype, supported=dtype))
        if heads and kv_heads and heads > _MOST_GROUP * kv_heads:
            message, most = "too many query heads share a KV head", f"up to {_MOST_GROUP}"
            found.append(Reason("head-group", message, wanted=str(heads // kv_heads), supported=most))
        if dtype and size:
            found += reasons(frozenset(_kernels(device, dtype, size, workload.features)))
        return found

    @classmethod
    def pending_build(cls, workload: AttentionWorkload, device: DeviceInfo) -> KernelBuild | None:
        """The build that nvcc has to make first: a minute or so."""
        if not workload.dtype or not workload.head_size:
            return None
        return attention_build(_kernels(device, workload.dtype, workload.head_size, workload.features))

    def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
        """Weights are loaded: what is not compiled yet is compiled now, so that no request waits for it."""
        super().set_head_constants(sinks, alibi_slopes)
        self._decode.load()
        self._prefill.load()

    def store(self, call: StoreCall) -> None:
        """See AttentionBackend."""
        self._cache.store(call)

    def plan(self, batch: AttentionBatch) -> FlashInferMetadata:
        """See AttentionBackend. Nothing waits for the device, unless two steps have been planned and not begun.

        FlashInfer plans captured decodes of one size alike, whatever their lengths, so a size has one token.
        """
        workspace = self.ctx.resources.get(WORKSPACE)
        if self._planner is None or self._planner.address != workspace.data_ptr():
            self._planner = StepPlanner(self.spec, self._prefill, workspace)
        if batch.graph_key is None:
            return FlashInferMetadata(batch, parts=self._planner.step(batch))
        wrapper, token = self._planner.decode_graph(batch)
        return FlashInferMetadata(batch, token, [(wrapper, slice(0, batch.num_tokens))])

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend. ``out`` is contiguous."""
        assert isinstance(call.metadata, FlashInferMetadata)
        for wrapper, rows in call.metadata.parts:
            wrapper.run(
                q=readable(call.q[rows]),
                paged_kv_cache=(call.cache["k"], call.cache["v"]),
                out=call.out[rows],
                enable_pdl=self._dependent_launch,
            )


def _kernels(device: DeviceInfo, dtype: str, head_size: int, features: frozenset[Feature]) -> tuple[Kernel, Kernel]:
    """For decodes and for everything else."""
    window, soft_cap = Feature.SLIDING_WINDOW in features, Feature.SOFT_CAP in features
    decode, prefill = "fa2", "fa3" if device.arch == "sm_90" else "fa2"
    return Kernel(decode, dtype, head_size, window, soft_cap), Kernel(prefill, dtype, head_size, window, soft_cap)


def _arch_number(device: DeviceInfo) -> int:
    digits = device.arch.removeprefix("sm_")
    return int(digits) if digits.isdecimal() else 0


def readable(q: torch.Tensor) -> torch.Tensor:
    """``q`` [T, H, D], or a copy where the kernels cannot read it: 16 bytes at a time, by 32-bit offsets."""
    aligned = q.data_ptr() % _ALIGNMENT == 0 and all(s * q.element_size() % _ALIGNMENT == 0 for s in q.stride()[:2])
    if aligned and q.stride(2) == 1 and q.shape[0] * q.stride(0) < 2**31:
        return q
    return q.clone(memory_format=torch.contiguous_format)
