"""Latent attention by FlashInfer's kernels of Ampere and Hopper: decodes and prompts of a step in one launch.

FlashInfer divides a step among all processors on the host, and has them read what it planned from memory on the device.
Graphs and eager steps share that memory and the list of pages, which are filled with the stream before each step; what
a launch is given besides depends on the device and on how long queries are on the average. Written from the sources of
0.6.14.

The cache has the layout "plain" and is written by core's kernel, so that core's backend serves steps beside this one.

Axes: T tokens, N requests, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.latent_attention import TritonLatentAttention
from hardpoint.kernels.page_indices import page_indices
from hardpoint_cuda.flashinfer_attention import WORKSPACE, readable
from hardpoint_cuda.flashinfer_builds import latent_build
from hardpoint_cuda.flashinfer_library import LatentKernel, module, reasons
from hardpoint_cuda.flashinfer_plan import Paging, PinnedTurn, alias
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    BuildContext,
    CacheLayout,
    CapacityError,
    CaptureGrade,
    DeviceInfo,
    KernelBuild,
    LatentBackend,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
    LatentWorkload,
    PlainLayout,
    Reason,
    Span,
)

MOST_HEADS = 128
"""FlashInfer plans at most 16,384 pieces of a step, and does not look whether there are more. A piece is 128 rows of
queries and heads or fewer, so that 8,192 tokens (the manifest's limit) of as many heads make at most 8,192, those that
are cut and a last one for each request besides."""
_ROWS = 64
"""Rows of a processor's tile (``cta_tile_q`` of ``MLAPlan``)."""


@dataclass
class FlashInferLatentMetadata(AttentionMetadata):
    """``wrapper``: has planned the step."""

    wrapper: Any = None


class FlashInferLatentAttention(LatentBackend):
    """See the top of this file. Partial results of long contexts are rounded to the queries' dtype."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.SINGLE_TOKEN

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        self._cache = TritonLatentAttention(ctx, spec)
        self._kernel = _kernel(ctx.device, spec.dtype, spec.latent_size, spec.rope_size)
        self._planner: LatentPlanner | None = None
        workspace = int(ctx.plugin_config("cuda")["flashinfer_workspace_mib"]) * 2**20
        ctx.resources.declare(WORKSPACE, workspace, scope="step")

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what no kernel takes, and say what FlashInfer lacks on this machine."""
        found = []
        if workload.kv_dtype not in (None, workload.dtype):
            message = "the cache's dtype is not the queries'"
            found.append(Reason("kv-dtype", message, wanted=workload.kv_dtype, supported=workload.dtype))
        if workload.num_heads is not None and workload.num_heads > MOST_HEADS:
            message, most = "query heads of a rank", f"up to {MOST_HEADS}"
            found.append(Reason("num-heads", message, wanted=str(workload.num_heads), supported=most))
        if workload.dtype and workload.latent_size and workload.rope_size:
            kernel = _kernel(device, workload.dtype, workload.latent_size, workload.rope_size)
            found += reasons(frozenset({kernel}))
        return found

    @classmethod
    def pending_build(cls, workload: LatentWorkload, device: DeviceInfo) -> KernelBuild | None:
        """The build that nvcc has to make first: a minute or so."""
        if not workload.dtype or not workload.latent_size or not workload.rope_size:
            return None
        return latent_build(_kernel(device, workload.dtype, workload.latent_size, workload.rope_size))

    def store(self, call: LatentStoreCall) -> None:
        """See LatentBackend."""
        self._cache.store(call)

    def plan(self, batch: AttentionBatch) -> FlashInferLatentMetadata:
        """See StepPlanner. Nothing waits for the device, unless two steps have been planned and not begun.

        The first call builds the kernel where that was not done ahead of time.
        """
        workspace = self.ctx.resources.get(WORKSPACE)
        if self._planner is None or self._planner.address != workspace.data_ptr():
            self._kernel.load()
            self._planner = LatentPlanner(self.spec, self._kernel.backend, workspace)
        wrapper, token = self._planner.step(batch)
        return FlashInferLatentMetadata(batch, token, wrapper)

    def forward(self, call: LatentCall) -> None:
        """See LatentBackend."""
        assert isinstance(call.metadata, FlashInferLatentMetadata)
        call.metadata.wrapper.run(
            q_nope=readable(call.q_latent),
            q_pe=readable(call.q_rope),
            ckv_cache=call.cache["latent"],
            kpe_cache=call.cache["rope_key"],
            out=call.out,
        )


class LatentPlanner:
    """Plans the steps of a group of layers. ``workspace`` is shared with all others: uint8, not kept alive by this."""

    def __init__(self, spec: LatentSpec, backend: str, workspace: torch.Tensor) -> None:
        self.address, self._spec, self._device = workspace.data_ptr(), spec, workspace.device
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        need = 2 * processors * _ROWS * (spec.latent_size * dtype_of(spec.dtype).itemsize + 4) + 32
        if need > workspace.numel():
            raise CapacityError(
                f"FlashInfer's latent attention needs {need:,} bytes of workspace on this device, and has "
                f"{workspace.numel():,}: set --cuda.flashinfer_workspace_mib to {-(-need // 2**20)} or more"
            )
        self._pages = torch.empty(0, dtype=torch.int32, device=self._device)
        self._captured: dict[object, torch.Tensor] = {}
        """The pages that each captured step reads: the place stays, where later steps need a larger one."""
        self._turns = [PinnedTurn(self._device) for _ in range(2)]
        self._turn = 0
        kind = module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        self._wrappers = [kind(float_workspace_buffer=alias(workspace), backend=backend) for _ in self._turns]
        for wrapper in self._wrappers[1:]:  # pinned memory is each one's own
            wrapper._int_workspace_buffer = self._wrappers[0]._int_workspace_buffer
        dtype = dtype_of(spec.dtype)
        self._alike = {
            "num_heads": spec.num_heads,
            "head_dim_ckv": spec.latent_size,
            "head_dim_kpe": spec.rope_size,
            "page_size": spec.block_size,
            "causal": True,
            "sm_scale": spec.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def step(self, batch: AttentionBatch) -> tuple[Any, tuple[int, ...]]:
        """Plan a step; returns the wrapper to run, and what of it is fixed where the step is captured."""
        self._turn = 1 - self._turn
        turn, wrapper = self._turns[self._turn], self._wrappers[self._turn]
        paging = Paging.of(batch.query_start_host, batch.seq_lens_host, Span(), self._spec.block_size)
        queries = np.array(batch.query_start_host, np.int32)
        host, filled = turn.fill(paging.starts, paging.first, paging.lengths, queries)
        starts, _, lengths, query_starts = host
        n = batch.num_requests
        arrays = filled.to(self._device, non_blocking=True)
        pages = self._room(batch)
        page_indices(batch.block_table, arrays[: n + 1], arrays[n + 1 : 2 * n + 1], paging.most, pages)
        wrapper.plan(qo_indptr=query_starts, kv_indptr=starts, kv_indices=pages, kv_len_arr=lengths, **self._alike)
        turn.close()
        return wrapper, tuple(map(int, wrapper._plan_info))

    def _room(self, batch: AttentionBatch) -> torch.Tensor:
        """Memory for as many pages as the table has places."""
        key = (batch.graph_key, batch.num_requests)
        if key in self._captured:
            return self._captured[key]
        if self._pages.numel() < batch.block_table.numel():
            self._pages = torch.empty(batch.block_table.numel(), dtype=torch.int32, device=self._device)
        if batch.graph_key is not None:
            self._captured[key] = self._pages
        return self._pages


def _kernel(device: DeviceInfo, dtype: str, latent_size: int, rope_size: int) -> LatentKernel:
    return LatentKernel("fa3" if device.arch == "sm_90" else "fa2", dtype, latent_size, rope_size)
