"""Communicators: the collectives of a group of ranks, and the groups that layers get.

Axes: N ranks of the group, T rows of a tensor. Tensors are contiguous and on the engine's device. All ranks of a group
make the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol

from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import CommunicatorWorkload

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, which mypy does not see there


class Collectives(Protocol):
    """Collective operations. ``rows``: the numbers of rows of the ranks, where they differ; None: all are equal."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, on every rank. It may be written to ``x``, which the caller does not read
        afterwards.
        """
        ...

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return ``x`` [T, ...] of all ranks, concatenated in rank order, on every rank."""
        ...

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, n] of all ranks side by side in rank order, [T, N * n], on every rank."""
        ...

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return this rank's rows of the sum over ranks of ``x`` [sum of rows, ...]: rank i gets the i-th block of
        rows.
        """
        ...

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Copy ``x`` of the group's rank ``root`` to ``x`` of all ranks."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send ``x`` to the group's rank ``to``, which must call ``recv`` with a tensor of the same shape and dtype.

        Work that is submitted after this call may overwrite ``x``.
        """
        ...

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Receive a tensor from the group's rank ``source``, which must call ``send``, and write it to ``x``.

        Work that is submitted after this call may read ``x``.
        """
        ...

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send the first ``send[0]`` rows of ``x`` to rank 0, the next ``send[1]`` rows to rank 1, and so on.

        Returns the received rows [sum of receive, ...] in rank order; rank i sent ``receive[i]`` of them.
        """
        ...


class RankGroup(Collectives, Protocol):
    """A group of ranks, as layers see it. In a group of one rank, each collective returns its argument.

    A layer keeps the group that it needs (``self._group = ctx.parallel.tp``) and calls it in ``forward``:
    ``self._group.all_reduce(y)``. Every rank must make the call, also a rank without rows. Where the numbers of rows
    differ, every rank passes all of them: ``group.all_gather(x, rows=[2, 0, 3])``. ``all_to_all`` needs the numbers of
    received rows; exchange them first.
    """

    @property
    def name(self) -> str:
        """``tp``, ``ep``, ``expert_tp`` or ``pp``."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...


@dataclass(frozen=True)
class Parallel:
    """The groups that this rank is in.

    ``tp``: all ranks of a replica's pipeline stage; they share every layer of it. ``ep``: ranks with different experts.
    ``expert_tp``: ranks with slices of the same experts; the size of ``tp`` is the product of these two. Where replicas
    share experts, ``ep`` has the ranks of all of them, replica by replica, and ``expert_tp`` has this rank alone.
    ``pp``: one rank of each pipeline stage, in stage order. ``backend``: the backend of torch.distributed that the
    platform prefers. ``on_one_host``: all ranks are on this machine. ``timeout``: seconds after which a collective
    counts as failed.
    """

    tp: RankGroup
    ep: RankGroup
    expert_tp: RankGroup
    pp: RankGroup
    backend: str = "gloo"
    on_one_host: bool = True
    timeout: float = 300.0


class GroupMember(ABC):
    """An object that joins a group of ranks: a communicator, or the kernel of an op of all ranks.

    It is constructed with the model, in the same order on every rank of its group, and declares the memory it needs:
    ``ctx.resources.declare("acme.all_reduce", nbytes, scope="collective")``. ``init`` is called on all ranks at once,
    before any step, when that memory exists; nothing may be allocated later. ``close`` is called in reverse order.
    ``abort`` is called from another thread when a rank has died: running collectives must then raise, or end on the
    device.

    The kernel of an op that takes a partial sum (``allreduce_add_rms_norm``) is created by a contribution of form
    ``factory``: ``target(ctx, workload, parts)`` returns a function. A returned object with ``__call__`` that is also a
    GroupMember joins the group ``ctx.parallel.tp``; uses of equal workloads share it.
    """

    @abstractmethod
    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        """Join the group. ``store`` is shared by its ranks alone; ``rank`` and ``world`` count within the group."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Leave the group; every rank calls this. Later calls raise RuntimeError."""
        raise NotImplementedError

    @abstractmethod
    def abort(self) -> None:
        """Leave at once, without the other ranks, also during a collective. Called when a rank has died.

        Later calls raise RuntimeError, and running ones too, at the latest when they time out. Work that waits in a
        device's queue cannot raise: it must end, with undefined results, so that nobody waits forever.
        """
        raise NotImplementedError


class Communicator(GroupMember):
    """The collectives of one group, implemented by a plugin. Layers call them through the RankGroups of
    ``ctx.parallel``.

    It joins and leaves as a GroupMember. The other methods are those of ``Collectives``. A method that is not
    overridden raises NotImplementedError, but for ``all_gather_columns``, which calls ``all_gather``. A method that
    cannot do what is asked must raise, never return its argument unchanged; where another rank broke off it raises
    RuntimeError, as torch.distributed does. ``capturable``: the methods may be captured in graphs. A contribution
    declares the dtypes that it can sum (``dtype``); it moves data of every dtype. Where several contributions serve
    ranges of sizes (``tokens``), each must have every collective that the model uses.
    """

    capturable: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, workload: CommunicatorWorkload) -> None:
        self.ctx, self.workload = ctx, workload

    @classmethod
    def supports(cls, workload: CommunicatorWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: no reason."""
        return []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over ranks, on every rank, as ``Collectives.all_reduce`` says."""
        self._refuse("all_reduce")

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return ``x`` [T, ...] of all ranks in rank order, as ``Collectives.all_gather`` says."""
        self._refuse("all_gather")

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, n] of all ranks side by side, as ``Collectives.all_gather_columns`` says.

        By default ``all_gather`` collects the ranks' columns, and a copy puts them side by side.
        """
        ranks = self.workload.ranks or 1
        return self.all_gather(x).view(ranks, *x.shape).transpose(0, 1).reshape(x.shape[0], ranks * x.shape[1])

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return this rank's rows of the sum over ranks, as ``Collectives.reduce_scatter`` says."""
        self._refuse("reduce_scatter")

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Copy ``x`` of rank ``root`` to ``x`` of all ranks."""
        self._refuse("broadcast")

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send ``x`` to rank ``to``, which calls ``recv``."""
        self._refuse("send")

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Fill ``x`` with the tensor that rank ``source`` sends."""
        self._refuse("recv")

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Exchange rows of ``x`` with every rank, as ``Collectives.all_to_all`` says."""
        self._refuse("all_to_all")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"the communicator {type(self).__name__} has no {what}")
