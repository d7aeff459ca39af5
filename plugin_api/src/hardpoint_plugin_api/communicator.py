"""Communicators: the collectives of one group of ranks, and the groups that layers are constructed with.

Axes: N ranks of the group, T rows of a tensor. Tensors are contiguous, and on the engine's device. Every rank of a
group makes the same calls in the same order.
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
    """What ranks do together. ``rows`` are the rows of each rank, where they differ; None: all have as many."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank. May be written to ``x``, which nobody reads afterwards."""
        ...

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """``x`` [T, ...] of all ranks, one after the other, on every rank."""
        ...

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The sum over ranks of ``x`` [sum of rows, ...]; of it, rank i gets the i-th rows."""
        ...

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Write ``x`` of the group's rank ``root`` to ``x`` of all."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send ``x`` to the group's rank ``to``, which calls ``recv``."""
        ...

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Fill ``x`` with what the group's rank ``source`` sends."""
        ...

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send the first ``send[0]`` rows of ``x`` to rank 0, the next ``send[1]`` to rank 1, and so on.

        Returns what came, [sum of receive, ...], rank after rank; rank i sent ``receive[i]`` rows.
        """
        ...


class RankGroup(Collectives, Protocol):
    """A group of ranks as layers see it. A group of one rank gives back what it is given.

    A layer keeps the group that it needs (``self._group = ctx.parallel.tp``) and calls it in ``forward``:
    ``self._group.all_reduce(y)``. Every rank must make the call, one that has no rows too. Rows that differ by rank are
    said on every rank alike: ``group.all_gather(x, rows=[2, 0, 3])``. ``all_to_all`` needs to know what comes; exchange
    the numbers first.
    """

    @property
    def name(self) -> str:
        """``tp``, ``ep``, ``expert_tp`` or ``pp``."""
        ...

    @property
    def size(self) -> int:
        """How many ranks."""
        ...

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...


@dataclass(frozen=True)
class Parallel:
    """The groups that this rank is in.

    ``tp`` is all ranks of a pipeline stage, and shares every layer of it. Mixtures of experts are shared by ``ep``,
    whose ranks hold whole experts each, and these by ``expert_tp``, whose ranks hold a slice of each of the same
    experts: ``tp`` is the product of both. ``pp`` has a rank of each stage, in the order of the stages. ``backend`` is
    what the platform prefers among torch.distributed's backends; ``on_one_host`` says that no rank is on another
    machine, and ``timeout`` after how many seconds a collective has failed.
    """

    tp: RankGroup
    ep: RankGroup
    expert_tp: RankGroup
    pp: RankGroup
    backend: str = "gloo"
    on_one_host: bool = True
    timeout: float = 300.0


class GroupMember(ABC):
    """What joins a group of ranks and leaves it with the engine: a communicator, or the kernel of an op of all ranks.

    It is constructed with the model, on every rank of its group in one order: declare there what memory it needs, as in
    ``ctx.resources.declare("acme.all_reduce", nbytes, scope="collective")``. That memory is there when ``init`` is
    called, on all ranks at once, before any step; nothing may be created later. ``close`` is called in reverse order,
    and ``abort``, from another thread, where a rank has died: what is under way must then raise, or end in its queue.

    The kernel of an op that takes a partial sum (``allreduce_add_rms_norm``) is made by a contribution of form
    ``factory``: ``target(ctx, workload, parts)`` returns a function. One that is a GroupMember itself, an object with
    ``__call__``, joins the group ``ctx.parallel.tp``; sites of equal workloads share it.
    """

    @abstractmethod
    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        """Join the group. ``store`` is shared by its ranks alone; ``rank`` of ``world`` count within it."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Leave the group in order; every rank does. Calls raise RuntimeError from now on."""
        raise NotImplementedError

    @abstractmethod
    def abort(self) -> None:
        """Leave at once, whatever is under way, without the others; called where a rank has died.

        Calls raise RuntimeError from now on, those under way too, at the latest when their time is up. What waits in a
        device's queue by then cannot raise: it ends, its results mean nothing, and who waits for them comes back.
        """
        raise NotImplementedError


class Communicator(GroupMember):
    """Collectives of one group, as a plugin provides them; layers call them through a RankGroup of ``ctx.parallel``.

    It joins and leaves as a GroupMember. The other methods are those of ``Collectives``; what is not overridden raises,
    and what cannot be done must raise too: none may hand data through. Raise RuntimeError, as torch.distributed does,
    where another rank broke off. ``capturable`` says whether they may be recorded in graphs. A contribution declares
    the dtypes that it can sum (``dtype``); moving data is for every dtype. Where contributions serve ranges of sizes
    (``tokens``), each has every collective that the model uses.
    """

    capturable: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, workload: CommunicatorWorkload) -> None:
        self.ctx, self.workload = ctx, workload

    @classmethod
    def supports(cls, workload: CommunicatorWorkload, device: DeviceInfo) -> list[Reason]:
        """Say what data cannot; called once, after import. Default: nothing to add."""
        return []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self._refuse("all_reduce")

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """See Collectives."""
        self._refuse("all_gather")

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """See Collectives."""
        self._refuse("reduce_scatter")

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """See Collectives."""
        self._refuse("broadcast")

    def send(self, x: torch.Tensor, to: int) -> None:
        """See Collectives."""
        self._refuse("send")

    def recv(self, x: torch.Tensor, source: int) -> None:
        """See Collectives."""
        self._refuse("recv")

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """See Collectives."""
        self._refuse("all_to_all")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"the communicator {type(self).__name__} has no {what}")
