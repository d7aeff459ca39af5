"""FlashInfer's all-to-all between GPUs of one host that write to each other's memory. None of this ran on hardware.

Arguments are passed by name. ``FLASHINFER`` says which, as recorded from ``flashinfer/comm/trtllm_moe_alltoall.py``,
``mapping.py`` and ``mnnvl.py`` of FlashInfer 0.6.18 (github.com/flashinfer-ai/flashinfer, fb28d7242).

Axes: N ranks, T tokens of this rank, M the most tokens of a rank, K experts per token, H hidden. A received tensor has
N x M rows; unused rows have no expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from hardpoint.experts.library_all2all import LibraryAll2All
from hardpoint.parallel.store_comm import StoreComm
from hardpoint.plugin_host.recorded_library import RecordedLibrary
from hardpoint_plugin_api import All2AllWorkload, DeviceInfo, Dispatched, DispatchHandle, Reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_EXCHANGE = "flashinfer.comm.trtllm_moe_alltoall:MoeAlltoAll"
_MAPPING = "flashinfer.comm.mapping:Mapping"
_CONFIG = "flashinfer.comm.mnnvl:MnnvlConfig"
FLASHINFER = RecordedLibrary(
    "FlashInfer",
    "flashinfer",
    "pip install 'flashinfer-python>=0.6.18,<0.7'",
    {
        f"{_EXCHANGE}.__init__": (
            *("mapping", "max_num_tokens", "top_k", "num_experts", "workspace_size_per_rank", "mnnvl_config"),
        ),
        f"{_EXCHANGE}.get_moe_workspace_size_per_rank": (
            *("ep_size", "top_k", "max_num_tokens", "hidden_size", "extra_payload_bytes_per_token"),
        ),
        f"{_EXCHANGE}.dispatch": (
            *("token_selected_experts", "input_payloads", "runtime_max_tokens_per_rank", "invalid_token_expert_id"),
            "expert_id_payload_index",
        ),
        f"{_EXCHANGE}.combine": ("payload", "runtime_max_tokens_per_rank"),
        f"{_MAPPING}.__init__": ("world_size", "rank", "gpus_per_node", "tp_size", "moe_tp_size", "moe_ep_size"),
        f"{_CONFIG}.__init__": ("comm_backend",),
    },
)

_SCALE_BYTES = 4
_NOBODY = -1


class FlashInferAll2All(LibraryAll2All):
    """A token is written once to each rank that has experts of it; sums are taken by their owner's kernel.

    Nobody waits for counts: all ranks have room for as many tokens as the largest has, which ``expect`` says.
    FlashInfer keeps the memory of equal sizes for the whole process.
    """

    _expected: Sequence[int] | None = None

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        return FLASHINFER.reasons()

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        kind, top_k = FLASHINFER.find(_EXCHANGE), self.workload.top_k
        size = kind.get_moe_workspace_size_per_rank(
            ep_size=world,
            top_k=top_k,
            max_num_tokens=self._most_tokens,
            hidden_size=self._hidden,
            extra_payload_bytes_per_token=_SCALE_BYTES * self._hidden,  # at most a scale for each element
        )
        comm = StoreComm(store, rank, world, self.ctx.parallel.timeout)
        mapping = FLASHINFER.find(_MAPPING)(
            world_size=world, rank=rank, gpus_per_node=world, tp_size=world, moe_tp_size=1, moe_ep_size=world
        )
        self._rank = rank
        self._made = kind(
            mapping=mapping,
            max_num_tokens=self._most_tokens,
            top_k=top_k,
            num_experts=self._experts,
            workspace_size_per_rank=size,
            mnnvl_config=FLASHINFER.find(_CONFIG)(comm_backend=comm),
        )

    def close(self) -> None:
        self._made = None

    def most_rows(self, tokens: int) -> int:
        """Where nobody says what to expect, there are rows for the most."""
        return self._ranks * max(tokens, self._most_tokens)

    def expect(self, rows: Sequence[int]) -> None:
        self._expected = rows

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        expected, self._expected = self._expected, None
        most = self._most_tokens if expected is None else max(1, *expected)
        given = [t.contiguous() for t in (x, ids, weights, *(() if scales is None else (scales,)))]
        came = self._object.dispatch(
            token_selected_experts=given[1],
            input_payloads=given,
            runtime_max_tokens_per_rank=most,
            invalid_token_expert_id=_NOBODY,
            expert_id_payload_index=1,
        )
        rows = [part.flatten(0, 1) for part in came]
        local = rows[1] - self._rank * self._own
        local = torch.where((local >= 0) & (local < self._own), local, _NOBODY)
        came_scales = None if scales is None else rows[3]
        return Dispatched(rows[0], came_scales, local, rows[2], None, DispatchHandle(most))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        most = cast("DispatchHandle[int]", handle).take()
        payload = y.view(self._ranks, most, y.shape[-1]).contiguous()
        out.copy_(self._object.combine(payload=payload, runtime_max_tokens_per_rank=most))
