"""DeepEP's all-to-alls between GPUs of one host, by its class ``Buffer``. None of this ran on hardware.

Arguments are passed by name. ``DEEPEP`` says which, as recorded from ``deep_ep/buffer.py`` of DeepEP 1.2.1
(github.com/deepseek-ai/DeepEP, 9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee); 2.1.0 has the same in
``deep_ep/buffers/legacy.py``. Limits of its kernels: ``csrc/deep_ep.cpp`` and ``csrc/kernels/`` there.

Axes: T tokens of this rank, R rows received, K experts per token, E experts of this rank, M rows per expert, H hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from hardpoint.experts.library_all2all import LibraryAll2All
from hardpoint.parallel.store_comm import StoreComm
from hardpoint.plugin_host.recorded_library import RecordedLibrary
from hardpoint_plugin_api import ActivationFormat, All2AllWorkload, DeviceInfo, Dispatched, DispatchHandle, Reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

DEEPEP = RecordedLibrary(
    "DeepEP",
    "deepep",
    "install DeepEP 1.2.1 (github.com/deepseek-ai/DeepEP), built for this PyTorch",
    {
        "deep_ep:Buffer.__init__": (
            *("group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "explicitly_destroy"),
            "comm",
        ),
        "deep_ep:Buffer.get_dispatch_config": ("num_ranks",),
        "deep_ep:Buffer.get_combine_config": ("num_ranks",),
        "deep_ep:Buffer.get_dispatch_layout": ("topk_idx", "num_experts"),
        "deep_ep:Buffer.dispatch": (
            *("x", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert"),
            *("topk_idx", "topk_weights"),
        ),
        "deep_ep:Buffer.combine": ("x", "handle"),
        "deep_ep:Buffer.get_low_latency_rdma_size_hint": (
            "num_max_dispatch_tokens_per_rank",
            "hidden",
            "num_ranks",
            "num_experts",
        ),
        "deep_ep:Buffer.low_latency_dispatch": (
            "x",
            "topk_idx",
            "num_max_dispatch_tokens_per_rank",
            "num_experts",
            "use_fp8",
        ),
        "deep_ep:Buffer.low_latency_combine": ("x", "topk_idx", "topk_weights", "handle", "out"),
        "deep_ep:Buffer.destroy": (),
    },
)

RANKS = (2, 4, 8)
"""Of one host: SWITCH_RANKS in csrc/kernels/launch.cuh."""

LOW_LATENCY_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
"""SWITCH_HIDDEN there."""

LOW_LATENCY_TOP_K = 11
"""kNumMaxTopK in csrc/kernels/internode_ll.cu."""

_VECTOR = 16
"""Bytes that a row is a multiple of."""


class _DeepEP(LibraryAll2All):
    """A buffer for each shape of experts, which the layers of that shape share."""

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        found = []
        if workload.ranks not in (None, *RANKS):
            supported = ", ".join(map(str, RANKS))
            found.append(Reason("ranks", "groups of other sizes only", wanted=str(workload.ranks), supported=supported))
        if "PCIE" in device.name.upper():
            found.append(Reason("nvlink", "GPUs without NVLink between all of them", wanted=device.name))
        return [*found, *DEEPEP.reasons()]

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        kind = DEEPEP.find("deep_ep:Buffer")
        comm = StoreComm(store, rank, world, self.ctx.parallel.timeout)
        self._made = kind(group=None, comm=comm, explicitly_destroy=True, **self._sizes(kind))

    @abstractmethod
    def _sizes(self, kind: Any) -> dict[str, Any]:
        """Of the buffer: the arguments of ``kind``, by name."""

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.destroy()


class HighThroughput(_DeepEP):
    """DeepEP's kernels for prompts: a token goes once to each rank that has experts of it, over NVLink.

    The host waits for the counts. Rows of one byte per element travel with float32 scales; DeepEP copies both as they
    are.
    """

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        found = super().supports(workload, device)
        if workload.hidden_size is not None and workload.hidden_size % _VECTOR:
            message = f"rows that are multiples of {_VECTOR} elements only"
            found.insert(0, Reason("hidden-size", message, wanted=str(workload.hidden_size)))
        return found

    def _sizes(self, kind: Any) -> dict[str, Any]:
        configs = (kind.get_dispatch_config(num_ranks=self._ranks), kind.get_combine_config(num_ranks=self._ranks))
        return {"num_nvl_bytes": max(c.get_nvl_buffer_size_hint(2 * self._hidden, self._ranks) for c in configs)}

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        given: Any = x.contiguous()
        if scales is not None:
            if x.itemsize != 1 or scales.dtype != torch.float32:
                raise ValueError(
                    f"DeepEP moves tokens of 8 bits with float32 scales, not {x.dtype} with {scales.dtype}; take an "
                    "experts kernel without quantized input, or another --all2all-backend"
                )
            given = (given.view(torch.float8_e4m3fn), scales.flatten(1).contiguous())
        wanted = ids.long().contiguous()
        of_rank, of_rdma_rank, of_expert, in_rank, _ = self._object.get_dispatch_layout(
            topk_idx=wanted, num_experts=self._experts
        )
        came, came_ids, came_weights, _, handle, _ = self._object.dispatch(
            x=given,
            num_tokens_per_rank=of_rank,
            num_tokens_per_rdma_rank=of_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=of_expert,
            topk_idx=wanted,
            topk_weights=weights.contiguous(),
        )
        came_scales = None
        if scales is not None:
            came, came_scales = came[0].view(x.dtype), came[1].view(-1, *scales.shape[1:])
        return Dispatched(came, came_scales, came_ids.int(), came_weights, None, DispatchHandle(handle))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        sums, _, _ = self._object.combine(x=y.contiguous(), handle=cast("DispatchHandle[Any]", handle).take())
        out.copy_(sums)


class LowLatency(_DeepEP):
    """DeepEP's kernels for decodes: every expert's batch has room for all tokens, and nobody waits for counts.

    They go through RDMA (IBGDA), or NVLink where it is there. Their buffer has room for each rank's share of the
    largest step: rows of experts x tokens, twice.
    """

    format: ClassVar[ActivationFormat] = "batched"

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        found = super().supports(workload, device)
        if workload.hidden_size not in (None, *LOW_LATENCY_HIDDEN):
            sizes = ", ".join(map(str, LOW_LATENCY_HIDDEN))
            message = "kernels for other hidden sizes only"
            found.insert(0, Reason("hidden-size", message, wanted=str(workload.hidden_size), supported=sizes))
        if workload.top_k is not None and workload.top_k > LOW_LATENCY_TOP_K:
            message, most = "fewer experts of a token", f"up to {LOW_LATENCY_TOP_K}"
            found.insert(0, Reason("top-k", message, wanted=str(workload.top_k), supported=most))
        return found

    def _sizes(self, kind: Any) -> dict[str, Any]:
        size = kind.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=self._most_tokens,
            hidden=self._hidden,
            num_ranks=self._ranks,
            num_experts=self._experts,
        )
        return {"num_rdma_bytes": size, "low_latency_mode": True, "num_qps_per_rank": self._own}

    def most_rows(self, tokens: int) -> int:
        """Batches are of one size in every step."""
        return self._experts * self._most_tokens

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        if scales is not None:
            raise ValueError(
                "DeepEP's low-latency kernels move bfloat16; take an experts kernel without quantized input, or "
                "another --all2all-backend"
            )
        wanted = ids.long().contiguous()
        came, counts, handle, _, _ = self._object.low_latency_dispatch(
            x=x.contiguous(),
            topk_idx=wanted,
            num_max_dispatch_tokens_per_rank=self._most_tokens,
            num_experts=self._experts,
            use_fp8=False,
        )
        kept = DispatchHandle((handle, wanted, weights.contiguous()))
        return Dispatched(came, None, None, None, counts, kept)

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        taken, wanted, weights = cast("DispatchHandle[tuple[Any, torch.Tensor, torch.Tensor]]", handle).take()
        self._object.low_latency_combine(x=y.contiguous(), topk_idx=wanted, topk_weights=weights, handle=taken, out=out)
