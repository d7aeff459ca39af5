"""An all-to-all of our own between the GPUs of one host, which write to each other's memory (kernels/peer_exchange.py).

Nobody waits for counts: every rank has room for as many tokens of each rank as the largest has, which ``expect`` says,
and rows that nobody wrote have no expert. So both calls are one launch each, and graphs capture them.

Axes: N ranks, T tokens of this rank, M the most tokens of a rank, K experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.launch import Launcher, aligned
from hardpoint_cuda.kernels.peer_exchange import combine_kernel, dispatch_kernel
from hardpoint_cuda.peer_memory import LeavingWord, PeerMemory, addresses, allocator_reasons
from hardpoint_plugin_api import (
    All2All,
    All2AllWorkload,
    BuildContext,
    DeviceInfo,
    Dispatched,
    DispatchHandle,
    GroupMember,
    Reason,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PROGRAMS = 4 * 108
"""The most programs of a launch; see ``_PROGRAMS_OF_A_MULTIPROCESSOR``."""
_PROGRAMS_OF_A_MULTIPROCESSOR = 4
"""All programs must run at once: a multiprocessor takes at least so many of WARPS warps and up to 64 registers."""

WARPS = 8
_VECTOR = 16
"""Bytes that a thread copies at once."""

_INTEGER = 4
_ALIGN = 128


@dataclass(frozen=True)
class Layout:
    """The parts of a rank's memory: bytes from its start, each a multiple of 128.

    ``flags`` int32 [N, PROGRAMS], by the rank that raises them; ``meetings`` int32 [PROGRAMS], the number of each
    program's last; ``left`` int32: see kernels/meeting.py. ``ids`` int32 and ``weights`` float32 [N, M, K].
    ``rows`` [N, M, H] in the dtype of activations, or in fewer bytes with scales behind them; ``sums`` [N, M, H], by
    the rank whose experts made them. ``size``: all of it.
    """

    flags: int
    meetings: int
    left: int
    ids: int
    weights: int
    rows: int
    sums: int
    size: int

    @classmethod
    def of(cls, ranks: int, tokens: int, top_k: int, row_bytes: int) -> Layout:
        """For up to ``tokens`` tokens of each rank, whose rows take ``row_bytes`` in the dtype of activations."""
        rows = ranks * tokens
        sizes = [ranks * PROGRAMS * _INTEGER, PROGRAMS * _INTEGER, _INTEGER, *[rows * top_k * _INTEGER] * 2]
        starts = [0]
        for size in (*sizes, rows * row_bytes + _ALIGN, rows * row_bytes):
            starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
        return cls(*starts)


@dataclass(frozen=True)
class _Sent:
    """The state between a dispatch and its combine: the ids that were dispatched, and the rows of each rank."""

    ids: torch.Tensor
    most: int


class PeerAll2All(GroupMember, All2All):
    """A token goes once to each rank that has experts of it; sums are taken in the order of the ranks, in float32.

    The tokens that ``dispatch`` delivers lie in memory of the group, and are gone after the next dispatch.
    """

    _expected: Sequence[int] | None = None
    _peers: PeerMemory | None = None
    _has_left = False
    _programs = 1
    """Of a launch, at most: as many as the smallest of the ranks' devices runs at once."""

    def __init__(self, ctx: BuildContext, workload: All2AllWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.ranks is not None
        assert workload.num_experts is not None
        assert workload.top_k is not None
        assert workload.hidden_size is not None
        assert workload.dtype is not None
        self._ranks, self._top_k, self._hidden = workload.ranks, workload.top_k, workload.hidden_size
        self._own, self._places = workload.num_experts // workload.ranks, 1 << (workload.top_k - 1).bit_length()
        # Ranks of a replica share its tokens; where several replicas share experts, each has as many.
        self._most_tokens = -(-ctx.limits.max_tokens // min(ctx.parallel.tp.size, workload.ranks))
        self._row_bytes = workload.hidden_size * dtype_of(workload.dtype).itemsize
        self.layout = Layout.of(workload.ranks, self._most_tokens, workload.top_k, self._row_bytes)
        self._dispatch, self._combine = Launcher(dispatch_kernel), Launcher(combine_kernel)
        self._key = f"cuda.peer_all2all {workload.key()}"
        ctx.resources.declare(self._key, self.layout.size, scope="collective")

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse memory that torch's allocator keeps to its process."""
        return allocator_reasons()

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        own = self.ctx.resources.get(self._key)
        own.zero_()
        self._memory, self._rank = own, rank
        self._leaving = LeavingWord(own.device)
        self._table = addresses([own.data_ptr()] * world, self._leaving, own.device)
        self._load()
        store.set(f"programs/{rank}", str(_programs(own.device)))
        peers = PeerMemory(own, store, rank, world, self.ctx.parallel.timeout, "--deny all2all=cuda_peer_memory")
        self._programs = min(int(store.get(f"programs/{other}")) for other in range(world))
        self._table = addresses(peers.pointers, self._leaving, own.device)
        self._peers = peers

    def _load(self) -> None:
        """Compile both kernels and put them on the device, by a launch among no ranks.

        Loading waits for the device, on which a program may wait for a rank that this thread keeps from going on.
        """
        dtype = dtype_of(self.workload.dtype or "")
        x = torch.zeros(1, self._hidden, dtype=dtype, device=self._memory.device)
        ids = torch.zeros(1, self._top_k, dtype=torch.int32, device=x.device)
        self._send(x, None, ids, ids.float(), 1, world=0)
        self._sum(x, x.clone(), _Sent(ids, 1), world=0)

    def close(self) -> None:
        self._has_left = True
        if self._peers is not None:
            self._peers.close()

    def abort(self) -> None:
        """Programs that wait on the device see a word that changes."""
        self._has_left = True
        if self._peers is not None:
            self._leaving.write()

    def most_rows(self, tokens: int) -> int:
        """Where nobody says what to expect, there are rows for the most."""
        return self._ranks * max(tokens, self._most_tokens)

    def expect(self, rows: Sequence[int]) -> None:
        self._expected = rows

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        expected, self._expected = self._expected, None
        self._check(x, scales, expected)
        most = self._most_tokens if expected is None else max(1, *expected)
        scales_at = self._send(x, scales, ids.contiguous(), weights.contiguous(), most, self._ranks)
        return Dispatched(
            self._came(self.layout.rows, x, most),
            None if scales is None else self._came(scales_at, scales, most),
            self._came(self.layout.ids, ids, most),
            self._came(self.layout.weights, weights, most),
            None,
            DispatchHandle(_Sent(ids.contiguous(), most)),
        )

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        sent = cast("DispatchHandle[_Sent]", handle).take()
        if self._has_left or self._peers is None:
            raise RuntimeError("this rank has left its group")
        total = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._sum(y.contiguous(), total, sent, self._ranks)
        if total is not out:
            out.copy_(total)

    def _check(self, x: torch.Tensor, scales: torch.Tensor | None, expected: Sequence[int] | None) -> None:
        """Raise RuntimeError where this rank has left or another number of its tokens was expected, and ValueError
        where the memory has no room for them."""
        if self._has_left or self._peers is None:
            raise RuntimeError("this rank has left its group")
        if expected is not None and expected[self._rank] != x.shape[0]:
            raise RuntimeError(f"{expected[self._rank]} tokens were to be dispatched here, not {x.shape[0]}")
        tokens = max([x.shape[0], *(expected or ())])
        if tokens > self._most_tokens:
            raise ValueError(
                f"{tokens} tokens of a rank are more than the {self._most_tokens} that its memory was made for; raise "
                "--max-num-batched-tokens"
            )
        row = x.shape[1] * x.itemsize
        if scales is not None:
            row += scales.shape[1:].numel() * scales.itemsize
        if row > self._row_bytes:
            raise ValueError(
                f"a token of {x.dtype} with its scales takes {row} bytes, and there are {self._row_bytes}; take an "
                "experts kernel with larger groups, or another --all2all-backend"
            )

    def _send(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        most: int,
        world: int,
    ) -> int:
        """Launch ``dispatch_kernel``. Returns where the scales of what comes begin."""
        at, row_bytes = self.layout, x.shape[1] * x.itemsize
        given = x.contiguous().view(_word(row_bytes))
        sizes = scales if scales is None else scales.contiguous().flatten(1)
        scale_words = 0 if sizes is None else sizes.shape[1]
        sizes = given if sizes is None else sizes
        scales_at = at.rows + -(-self._ranks * most * row_bytes // _VECTOR) * _VECTOR
        vector, block = _widths(row_bytes, given.itemsize)
        key = (given.dtype, sizes.dtype, vector, scales_at >> 31, scale_words >> 31)
        self._dispatch(
            key if aligned(given, sizes, ids, weights) else None,
            (min(most, self._programs), 1, 1),
            WARPS,
            given,
            sizes,
            ids,
            weights,
            self._table,
            x.shape[0] if world else 0,
            most if world else 0,
            given.shape[1],
            scale_words,
            self._top_k,
            self._own,
            self._rank,
            world,
            at.flags,
            at.meetings,
            at.left,
            at.ids,
            at.weights,
            at.rows,
            scales_at,
            vector,
            self._places,
            PROGRAMS,
            block,
        )
        return scales_at

    def _sum(self, y: torch.Tensor, out: torch.Tensor, sent: _Sent, world: int) -> None:
        """Launch ``combine_kernel``."""
        at = self.layout
        vector, block = _widths(y.shape[1] * y.itemsize, y.itemsize)
        self._combine(
            (y.dtype, out.dtype, vector) if aligned(y, out, sent.ids) else None,
            (min(sent.most, self._programs), 1, 1),
            WARPS,
            y,
            out,
            sent.ids,
            self._table,
            out.shape[0] if world else 0,
            sent.most if world else 0,
            self._hidden,
            self._top_k,
            self._own,
            self._rank,
            world,
            at.flags,
            at.meetings,
            at.left,
            at.ids,
            at.sums,
            self._ranks,
            vector,
            self._places,
            PROGRAMS,
            block,
        )

    def _came(self, start: int, like: torch.Tensor, most: int) -> torch.Tensor:
        """The part of this rank's memory that begins at ``start``: rows as those of ``like``, ``most`` of each rank."""
        shape = (self._ranks * most, *like.shape[1:])
        return self._memory[start:][: shape[0] * like.shape[1:].numel() * like.itemsize].view(like.dtype).view(shape)


def _programs(device: torch.device) -> int:
    """How many programs the device runs at once, at most PROGRAMS."""
    if device.type != "cuda":
        return PROGRAMS
    return min(PROGRAMS, _PROGRAMS_OF_A_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


def _word(row_bytes: int) -> torch.dtype:
    """The widest integers that a row of so many bytes consists of."""
    return torch.int32 if row_bytes % 4 == 0 else torch.int16 if row_bytes % 2 == 0 else torch.uint8


def _widths(row_bytes: int, itemsize: int) -> tuple[int, int]:
    """How many elements a thread copies at once, and a program."""
    vector = _VECTOR // itemsize
    return vector if row_bytes % _VECTOR == 0 else 1, vector * 32 * WARPS
