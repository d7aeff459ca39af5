"""MORI's exchange as python/mori of 624002c8 has it, computing on the host, among ranks in threads of one process.

As there, a rank has joined the shared memory before it makes an exchange, what comes has room for the most rows, and
results have room for the most tokens. Rows that mean nothing are NaN.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

CALLS: Counter[str] = Counter()
"""How often each function was called."""

MORI_SHMEM_INIT_WITH_UNIQUEID = 2
_groups: dict[bytes, _Group] = {}
_here = threading.local()


class _Group:
    def __init__(self, size: int) -> None:
        self.barrier, self.given, self.used = threading.Barrier(size), [None] * size, 0

    def allgather(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait(20)
        found = list(self.given)
        self.barrier.wait(20)
        return found


def shmem_get_unique_id() -> bytes:
    return secrets.token_bytes(128)


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    CALLS["shmem_init_attr"] += 1
    if flags != MORI_SHMEM_INIT_WITH_UNIQUEID or len(unique_id) != 128 or hasattr(_here, "group"):
        return -1
    _here.group = _groups.setdefault(unique_id, _Group(nranks))
    return 0


def shmem_finalize() -> int:
    CALLS["shmem_finalize"] += 1
    return 0


@dataclass
class EpDispatchCombineConfig:
    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: object = None
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str = "none"


class EpDispatchCombineOp:
    def __init__(self, config: EpDispatchCombineConfig) -> None:
        CALLS["EpDispatchCombineOp"] += 1
        self._config, self._group = config, _here.group
        assert config.gpu_per_node >= config.world_size

    def dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: object = None,
        return_routing: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor, torch.Tensor]:
        CALLS["dispatch"] += 1
        config = self._config
        if input.dtype not in (torch.bfloat16, torch.float32) or input.shape[1] != config.hidden_dim:
            raise RuntimeError("input must be [tokens, hidden_dim] of a known dtype")
        if indices.dtype != torch.int32 or weights.dtype != torch.float32 or scales is not None:
            raise RuntimeError("indices are int32, weights float32")
        if not (input.is_contiguous() and indices.is_contiguous() and weights.is_contiguous()):
            raise RuntimeError("addresses are taken of contiguous tensors")
        assert len(input) <= config.max_num_inp_token_per_rank
        most, own = config.world_size * config.max_num_inp_token_per_rank, config.num_experts_per_rank
        came = torch.full((most, config.hidden_dim), torch.nan, dtype=input.dtype)
        came_weights = torch.full((most, config.num_experts_per_token), torch.nan)
        came_ids = torch.zeros(most, config.num_experts_per_token, dtype=torch.int32)
        self._sources, total = [], 0
        for rows, their_weights, ids in self._group.allgather(config.rank, (input, weights, indices)):
            tokens = (ids // own == config.rank).any(1).nonzero()[:, 0]
            place = slice(total, total + len(tokens))
            came[place], came_weights[place], came_ids[place] = rows[tokens], their_weights[tokens], ids[tokens]
            self._sources.append(tokens)
            total = place.stop
        self._tokens = len(input)
        return came, came_weights, None, came_ids, torch.tensor([total], dtype=torch.int32)

    def combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        routing: object = None,
    ) -> tuple[torch.Tensor, None]:
        CALLS["combine"] += 1
        if indices.dtype != torch.int32 or len(indices) != self._tokens:
            raise ValueError("indices are not the dispatched ones")
        if not input.is_contiguous():
            raise RuntimeError("addresses are taken of contiguous tensors")
        out = torch.full((self._config.max_num_inp_token_per_rank, input.shape[1]), torch.nan, dtype=input.dtype)
        total = torch.zeros(self._tokens, input.shape[1])
        rank = self._config.rank
        for rows, sources in self._group.allgather(rank, (input, self._sources)):
            part = rows[: sum(map(len, sources))].split([len(tokens) for tokens in sources])[rank]
            total.index_add_(0, sources[rank], part.float())
        out[: self._tokens] = total.to(input.dtype)
        return out, None
