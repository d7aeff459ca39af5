"""FlashInfer's MoeAlltoAll as 0.6.18 has it, computing on the host: ranks exchange through ``comm_backend``.

Calls that the real one refuses (its assertions, and those of csrc/trtllm_moe_alltoall.cu) raise. Unused rows are NaN,
or expert 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

CALLS: Counter[str] = Counter()
"""How often each method was called."""


class Mapping:
    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: object = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        if tp_size * cp_size * pp_size != world_size or moe_tp_size * moe_ep_size != tp_size:
            raise ValueError("sizes do not multiply to the world")
        self.moe_ep_size, self.moe_ep_rank = moe_ep_size, rank % moe_ep_size


@dataclass
class MnnvlConfig:
    comm_backend: Any = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


class MoeAlltoAll:
    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
    ) -> int:
        return ep_size * max_num_tokens * (4 * hidden_size + 8 * top_k + extra_payload_bytes_per_token)

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
    ) -> None:
        assert workspace_size_per_rank is not None
        assert mnnvl_config is not None
        CALLS["MoeAlltoAll"] += 1
        self._comm = mnnvl_config.comm_backend.Split(0, mapping.moe_ep_rank)
        self._rank, self._size, self._experts = mapping.moe_ep_rank, mapping.moe_ep_size, num_experts
        self._most, self._bytes, self._top_k = max_num_tokens, workspace_size_per_rank, top_k
        self._sent: list[torch.Tensor] | None = None
        self._comm.barrier()

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        CALLS["dispatch"] += 1
        assert self._sent is None, "dispatch called twice without combine"
        assert runtime_max_tokens_per_rank <= self._most, "runtime_max_tokens_per_rank exceeds max_num_tokens"
        ids, most = token_selected_experts, runtime_max_tokens_per_rank
        if ids.dtype != torch.int32 or ids.shape[1] != self._top_k or len(ids) > most:
            raise RuntimeError("token_selected_experts must be int32 [local_num_tokens, top_k]")
        for payload in input_payloads:
            if payload.dim() != 2 or len(payload) != len(ids) or not payload.is_contiguous():
                raise RuntimeError("payloads must be contiguous [local_num_tokens, elements]")
        if sum(self._size * most * payload[:1].nbytes for payload in input_payloads) > self._bytes:
            raise RuntimeError("the workspace is too small")
        own = self._experts // self._size
        came = [self._nothing(payload, most) for payload in input_payloads]
        everyone = self._comm.allgather((ids, input_payloads))
        self._sent = [(their_ids // own == self._rank).any(1).nonzero()[:, 0] for their_ids, _ in everyone]
        for source, (tokens, (_, payloads)) in enumerate(zip(self._sent, everyone, strict=True)):
            for into, payload in zip(came, payloads, strict=True):
                into[source, : len(tokens)] = payload[tokens]
            if invalid_token_expert_id is not None:
                assert expert_id_payload_index is not None
                came[expert_id_payload_index][source, len(tokens) :] = invalid_token_expert_id
        self._tokens = len(ids)
        return came

    def _nothing(self, payload: torch.Tensor, most: int) -> torch.Tensor:
        made = payload.new_zeros(self._size, most, payload.shape[1])
        return made.fill_(torch.nan) if made.is_floating_point() else made

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: object = None,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        CALLS["combine"] += 1
        assert self._sent is not None, "combine called before successful dispatch"
        if payload.shape[:2] != (self._size, runtime_max_tokens_per_rank) or not payload.is_contiguous():
            raise RuntimeError("payload must be contiguous [ep_size, runtime_max_tokens_per_rank, elements]")
        total = torch.zeros(self._tokens, payload.shape[2])
        for rows, sent in self._comm.allgather((payload, self._sent)):
            tokens = sent[self._rank]
            total.index_add_(0, tokens, rows[self._rank, : len(tokens)].float())
        self._sent = None
        return total.to(payload.dtype)
