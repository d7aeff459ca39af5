"""The all-to-all of ranks that share memory: tokens are sorted, packed and sent by compiled code (csrc/sent_rows.h).

Axes: T tokens of this rank, R rows received, K experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from hardpoint.parallel.control import RankLostError
from hardpoint_cpu.compiled import missing
from hardpoint_cpu.shared_ranks import SharesMemory, reasons, sum_kernel
from hardpoint_plugin_api import All2All, All2AllWorkload, DeviceInfo, Dispatched, DispatchHandle, Reason

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

if missing() is None:
    from hardpoint_cpu import _native


class SharedMemoryAll2All(SharesMemory, All2All):
    """A token goes once to each rank that has experts of it. Sums are taken in the order of the ranks.

    It takes two waits for the other ranks: one in ``dispatch``, in which row counts travel beside the rows, and one in
    ``combine``.
    """

    capturable = False

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        return reasons(workload.ranks)

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        joined, ids = self._joined, ids.contiguous()
        assert self.workload.num_experts is not None
        given = [t.contiguous() for t in (x, weights, *(() if scales is None else (scales,)))]
        widths = [t.shape[1:].numel() * t.itemsize for t in given]
        with _together():
            sent, rows = _native.ranks_dispatch(
                joined.group,
                ids.data_ptr(),
                ids.shape[0],
                ids.shape[1],
                self.workload.num_experts // joined.world,
                [t.data_ptr() for t in given],
                widths,
            )
        came_ids = ids.new_empty(rows, ids.shape[1])
        came = [t.new_empty(rows, *t.shape[1:]) for t in given]
        with _together():
            _native.ranks_take_rows(sent, came_ids.data_ptr(), [t.data_ptr() for t in came], widths)
        return Dispatched(came[0], None if scales is None else came[2], came_ids, came[1], None, DispatchHandle(sent))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        sent = cast("DispatchHandle[CapsuleType]", handle).take()
        y, total = y.contiguous(), out if out.is_contiguous() and out.dtype == y.dtype else y.new_empty(out.shape)
        with _together():
            _native.ranks_combine(
                self._joined.group,
                sent,
                sum_kernel(y),
                y.data_ptr(),
                total.data_ptr(),
                out.shape[0],
                out.shape[1],
                y.itemsize,
            )
        if total is not out:
            out.copy_(total)


@contextmanager
def _together() -> Iterator[None]:
    """Tell an exchange that another rank broke off from what this rank did wrong."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"the exchange of tokens among ranks broke off: {error}") from error
