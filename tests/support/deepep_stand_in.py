"""DeepEP's Buffer as deep_ep/buffer.py of 1.2.1 has it, computing on the host: ranks exchange through ``comm``.

Calls that the real one refuses (the assertions of csrc/deep_ep.cpp) raise RuntimeError, as there. Unused rows are NaN.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

CALLS: Counter[str] = Counter()
"""How often each method was called."""


def _assert(condition: bool) -> None:
    if not condition:
        raise RuntimeError("Assertion error csrc/deep_ep.cpp")


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128 * hidden_bytes * num_ranks


class Buffer:
    def __init__(
        self,
        group: object,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        assert group is None
        self.rank, self.group_size, self._comm = comm.Get_rank(), comm.Get_size(), comm
        self._low_latency, self._rdma, self._nvl = low_latency_mode, num_rdma_bytes, num_nvl_bytes
        self._destroyable, self._qps = explicitly_destroy, num_qps_per_rank
        CALLS["Buffer"] += 1
        comm.allgather(("handle", self.rank))

    def destroy(self) -> None:
        assert self._destroyable, "`explicitly_destroy` flag must be set"
        del self._comm

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 4 * num_experts * num_max_dispatch_tokens_per_rank * hidden

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, object]:
        _assert(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.dim() == 2)
        own = num_experts // self.group_size
        experts = torch.arange(num_experts)
        per_expert = (topk_idx[..., None] == experts).sum((0, 1)).int()
        ranks = torch.arange(self.group_size)
        in_rank = ((topk_idx[..., None] >= ranks * own) & (topk_idx[..., None] < (ranks + 1) * own)).any(1)
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: Any,
        handle: object = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: object = None,
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, torch.Tensor, torch.Tensor, list[int], Any, object]:
        CALLS["dispatch"] += 1
        rows, scales = x if isinstance(x, tuple) else (x, None)
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        _assert(self._nvl > 0)
        _assert(rows.dim() == 2 and rows.is_contiguous() and rows.shape[1] * rows.itemsize % 16 == 0)
        _assert(is_token_in_rank.dtype == torch.bool and is_token_in_rank.shape == (len(rows), self.group_size))
        _assert(num_tokens_per_rank.dtype == torch.int32 and num_tokens_per_expert.dtype == torch.int32)
        _assert(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.shape[0] == len(rows))
        _assert(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous())
        if scales is None:
            _assert(rows.dtype == torch.bfloat16)
        else:
            _assert(rows.itemsize == 1 and scales.dtype == torch.float32 and scales.dim() == 2)
        everyone = self._comm.allgather((rows, scales, is_token_in_rank, topk_idx, topk_weights))
        own = len(num_tokens_per_expert) // self.group_size
        parts, sources = [], []
        for their_rows, their_scales, in_rank, ids, weights in everyone:
            mine = in_rank[:, self.rank].nonzero()[:, 0]
            local = ids[mine] - self.rank * own
            is_here = (local >= 0) & (local < own)
            parts.append(
                (
                    their_rows[mine],
                    None if their_scales is None else their_scales[mine],
                    torch.where(is_here, local, -1),
                    torch.where(is_here, weights[mine], 0.0),
                )
            )
            sources.append(mine)
        came, came_scales, came_ids, came_weights = (
            None if columns[0] is None else torch.cat(columns) for columns in zip(*parts, strict=True)
        )
        assert came_ids is not None
        counts = [(came_ids == expert).any(-1).sum().item() for expert in range(own)]
        back = (len(rows), sources)
        return came if scales is None else (came, came_scales), came_ids, came_weights, counts, back, None  # type: ignore[return-value]

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: object = None,
        config: object = None,
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, object]:
        CALLS["combine"] += 1
        tokens, sources = handle
        _assert(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16)
        _assert(len(x) == sum(map(len, sources)))
        total = torch.zeros(tokens, x.shape[1])
        for rows, theirs in self._comm.allgather((x, sources)):
            part = rows.split([len(source) for source in theirs])[self.rank]
            total.index_add_(0, theirs[self.rank], part.float())
        return total.bfloat16(), None, None

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, Any, object, object]:
        CALLS["low_latency_dispatch"] += 1
        assert not use_fp8
        own, most = num_experts // self.group_size, num_max_dispatch_tokens_per_rank
        _assert(self._low_latency and self._qps == own)
        _assert(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16 and x.shape[1] % 128 == 0)
        _assert(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and len(topk_idx) == len(x) <= most)
        hint = self.get_low_latency_rdma_size_hint(most, x.shape[1], self.group_size, num_experts)
        _assert(hint <= self._rdma)
        came = torch.full((own, most * self.group_size, x.shape[1]), torch.nan, dtype=torch.bfloat16)
        counts, sources = torch.zeros(own, dtype=torch.int32), list[list[tuple[int, int]]]()
        everyone = self._comm.allgather((x, topk_idx))
        for expert in range(own):
            found = list[tuple[int, int]]()
            for rank, (rows, ids) in enumerate(everyone):
                for token in (ids == self.rank * own + expert).any(-1).nonzero()[:, 0].tolist():
                    came[expert, len(found)] = rows[token]
                    found.append((rank, token))
            counts[expert] = len(found)
            sources.append(found)
        return came, counts, (sources, most, num_experts), None, None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, object, object]:
        CALLS["low_latency_combine"] += 1
        sources, most, num_experts = handle
        own = num_experts // self.group_size
        _assert(x.shape[:2] == (own, most * self.group_size) and x.is_contiguous() and x.dtype == torch.bfloat16)
        _assert(topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape)
        assert out is not None
        _assert(out.is_contiguous() and out.dtype == torch.bfloat16 and out.shape == (len(topk_idx), x.shape[2]))
        total = torch.zeros(out.shape)
        valid = [x[expert, : len(found)] for expert, found in enumerate(sources)]
        for rank, (rows, theirs) in enumerate(self._comm.allgather((valid, sources))):
            for expert, found in enumerate(theirs):
                for place, (source, token) in enumerate(found):
                    if source == self.rank:
                        weight = topk_weights[token][topk_idx[token] == rank * own + expert].sum()
                        total[token] += rows[expert][place].float() * weight
        return out.copy_(total), None, None
