"""All-to-alls on top of any communicator of the group of expert ranks, whose tokens may differ in number.

Axes: N ranks, T tokens of this rank, R rows received, K experts per token, H hidden. Rank r holds the r-th of N equal
pieces of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from hardpoint_plugin_api import All2All, All2AllWorkload, BuildContext, Dispatched, DispatchHandle

_Sent = tuple[torch.Tensor, list[int], list[int]]
"""The tokens that were sent, rank after rank; how many to each rank, and how many came from each."""


class _AmongRanks(All2All):
    """Base of the exchanges among ranks: knows the experts of each rank."""

    def __init__(self, ctx: BuildContext, workload: All2AllWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.num_experts is not None
        self._group = ctx.parallel.ep
        self._num_own = workload.num_experts // self._group.size

    def _own(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids over all ranks -> ids of this rank's experts, -1 for the others."""
        local = ids - self._group.rank * self._num_own
        return torch.where((local >= 0) & (local < self._num_own), local, -1)


class AllGatherReduceScatter(_AmongRanks):
    """Every rank gets every token, and makes of it what its experts do; sums go back to whose token it is."""

    _expected: Sequence[int] | None = None

    def expect(self, rows: Sequence[int]) -> None:
        self._expected = rows

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        rows = self._rows(x)
        everyone = self._gather(x, rows)
        all_scales = None if scales is None else self._gather(scales, rows)
        all_ids, all_weights = self._own(self._gather(ids, rows)), self._gather(weights, rows)
        return Dispatched(everyone, all_scales, all_ids, all_weights, None, DispatchHandle(rows))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        rows = cast(DispatchHandle[list[int]], handle).take()
        out.copy_(self._sums(y, rows))

    def _rows(self, x: torch.Tensor) -> list[int]:
        """How many tokens each rank dispatches. Where that is not known, the host waits for the device."""
        expected, self._expected = self._expected, None
        if expected is not None:
            if expected[self._group.rank] != x.shape[0]:
                raise RuntimeError(f"{expected[self._group.rank]} tokens were to be dispatched here, not {x.shape[0]}")
            return list(expected)
        counts: list[int] = self._group.all_gather(torch.tensor([x.shape[0]], device=x.device)).tolist()
        return counts

    def _gather(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return self._group.all_gather(x.contiguous(), rows)

    def _sums(self, y: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return self._group.reduce_scatter(y, rows)


class NaiveAll2All(AllGatherReduceScatter):
    """The same out of the simplest collectives: a broadcast from each rank, and one sum on all of them."""

    def _gather(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        parts = [x.new_empty(count, *x.shape[1:]) for count in rows]
        parts[self._group.rank].copy_(x)
        for root, part in enumerate(parts):
            if part.numel():
                self._group.broadcast(part, root)
        return torch.cat(parts)

    def _sums(self, y: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        start = sum(rows[: self._group.rank])
        total = self._group.all_reduce(y) if y.numel() else y
        return total[start : start + rows[self._group.rank]]


class Replicated(_AmongRanks):
    """Nothing travels: every rank has every token, and makes of it what its experts do."""

    replicated = True
    _expected: int | None = None

    def most_rows(self, tokens: int) -> int:
        return tokens

    def expect(self, rows: Sequence[int]) -> None:
        self._expected = rows[self._group.rank]

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        expected, self._expected = self._expected, None
        if expected not in (None, x.shape[0]):  # a layer that still routes a share, say
            raise RuntimeError(f"all of the {expected} tokens were to be dispatched here, not {x.shape[0]}")
        return Dispatched(x, scales, self._own(ids), weights, None, DispatchHandle(None))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        cast(DispatchHandle[None], handle).take()
        if y is not out:
            out.copy_(y)


class AllToAll(_AmongRanks):
    """A token goes once to each rank that has experts of it. Sums are taken in the order of the ranks.

    How many go where is decided by their experts: the host waits for the device.
    """

    capturable = False

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        size = self._group.size
        wanted = torch.zeros(x.shape[0], size + 1, dtype=torch.bool, device=x.device)
        owners = torch.where(ids < 0, size, ids.long() // self._num_own)
        wanted = wanted.scatter_(1, owners, True)[:, :size]
        tokens = wanted.t().nonzero()[:, 1]  # rank after rank, each in the order of the tokens
        counts = self._group.all_gather(wanted.sum(0, keepdim=True)).tolist()
        send, receive = counts[self._group.rank], [row[self._group.rank] for row in counts]

        def exchange(rows: torch.Tensor) -> torch.Tensor:
            return self._group.all_to_all(rows[tokens], send, receive)

        return Dispatched(
            exchange(x),
            None if scales is None else exchange(scales),
            self._own(exchange(ids)),
            exchange(weights),
            None,
            DispatchHandle((tokens, send, receive)),
        )

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        tokens, send, receive = cast(DispatchHandle[_Sent], handle).take()
        back = self._group.all_to_all(y, receive, send)
        total = torch.zeros(out.shape, dtype=torch.promote_types(y.dtype, torch.float32), device=out.device)
        for rows, where in zip(back.split(send), tokens.split(send), strict=True):
            total.index_add_(0, where, rows.to(total.dtype))
        out.copy_(total)
