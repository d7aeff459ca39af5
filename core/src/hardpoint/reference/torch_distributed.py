"""The communicator over torch.distributed, by the backend that the platform prefers.

Calls go to the process group itself. The functions of ``torch.distributed`` keep state for the whole process, and a
coalescing that fails there leaves later reductions skipped without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hardpoint.parallel.process_group import Store, process_group
from hardpoint_plugin_api import Communicator


class TorchDistributed(Communicator):
    """Ragged gathers are padded to the longest, and ragged scatters are reduced whole."""

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        facts = self.ctx.parallel
        self._joined = process_group(facts.backend, store, rank, world, facts.timeout, on_one_host=facts.on_one_host)
        self._rank, self._world, self._has_left = rank, world, False

    def close(self) -> None:
        self._has_left = True
        self._joined.shutdown()

    def abort(self) -> None:
        self._has_left = True
        self._joined.abort()

    @property
    def _group(self) -> dist.ProcessGroup:
        """The group. gloo itself would go on serving who has left it."""
        if self._has_left:
            raise RuntimeError("this rank has left its group")
        return self._joined

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        rows = [x.shape[0]] * self._world if rows is None else rows
        most = max(rows)
        if x.shape[0] < most:
            x = torch.cat([x, x.new_empty(most - x.shape[0], *x.shape[1:])])
        gathered = x.new_empty(self._world * most, *x.shape[1:])
        if gathered.numel():
            # torch.distributed's all_gather_into_tensor calls this method, the only name of it in every version.
            self._group._allgather_base(_movable(gathered), _movable(x)).wait()
        if all(count == most for count in rows):
            return gathered
        return torch.cat([part[:count] for part, count in zip(gathered.split(most), rows, strict=True)])

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        if rows is None or len(set(rows)) == 1:
            own = x.new_empty(x.shape[0] // self._world, *x.shape[1:])
            if own.numel():
                self._group._reduce_scatter_base(own, x, dist.ReduceScatterOptions()).wait()
            return own
        start = sum(rows[: self._rank])
        return self.all_reduce(x.clone())[start : start + rows[self._rank]]

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([_movable(x)], options).wait()

    def send(self, x: torch.Tensor, to: int) -> None:
        self._group.send([_movable(x)], to, 0).wait()

    def recv(self, x: torch.Tensor, source: int) -> None:
        self._group.recv([_movable(x)], source, 0).wait()

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        received = x.new_empty(sum(receive), *x.shape[1:])
        self._group.alltoall_base(_movable(received), _movable(x), list(receive), list(send)).wait()
        return received


class GatherAndSum(TorchDistributed):
    """Sums in the order of the ranks, so that a sum does not depend on where in the tensor it stands."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.all_gather(x[None]).unbind()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        rows = [x.shape[0] // self._world] * self._world if rows is None else rows
        start = sum(rows[: self._rank])
        return self.all_reduce(x)[start : start + rows[self._rank]]


def _movable(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a dtype that every backend moves: gloo knows no 8-bit floats."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x
