"""Groups of ranks: how the world is divided, and which communicator serves each group for which sizes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from hardpoint.dtypes import dtype_name
from hardpoint.parallel.control import ControlGroup, RankLostError
from hardpoint.parallel.topology import GROUPS, Coordinates
from hardpoint.plugin_host.blame import blame, construct, misbehaved
from hardpoint_plugin_api import Communicator, CommunicatorWorkload, GroupMember, Parallel

if TYPE_CHECKING:
    import torch

    from hardpoint.context import Context
    from hardpoint.parallel.process_group import Store
    from hardpoint.plugin_host import Offer

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""How long leaving the groups in order may take, before they are left without the others."""

_PATIENCE = 30.0
"""Seconds by which a collective outlasts a step's own time: whoever waits for the step says more about what hangs."""


@dataclass
class Group:
    """A group of ranks, a RankGroup. Its communicators, and the kernels of ops that sum over it, are made with the
    model, and joined by ``open``.

    ``members`` are the world's ranks in it, ``world_rank`` is one of them.
    """

    name: str
    members: tuple[int, ...]
    world_rank: int
    _served: list[tuple[int | None, Communicator]] = field(default_factory=list)
    _adopted: list[tuple[Offer, GroupMember]] = field(default_factory=list)
    _joined: list[GroupMember] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.members.index(self.world_rank)

    @property
    def served_by(self) -> tuple[str, ...]:
        """The names of the contributions whose communicators serve it, by size."""
        return tuple(o.contribution.name for o, member in self._adopted if isinstance(member, Communicator))

    def select(self, ctx: Context) -> None:
        """Ask the selector who serves this group, and construct the winners."""
        if self.size == 1:
            return
        parallel = {"expert_tp": "tp"}.get(self.name, self.name)
        workload = CommunicatorWorkload(
            dtype=dtype_name(ctx.dtype), parallel=parallel, ranks=self.size, features=ctx.group_features
        )
        plan = ctx.select(workload)
        for entry in plan.entries:
            made = construct(entry.offer, ctx.load(entry.offer), Communicator, ctx, plan.workload)
            if self.name == "pp" and not _sends(type(made)):
                text = "needs send and recv to serve pipeline stages; claim other groups alone, as parallel = ['tp']"
                raise misbehaved(entry.offer, text)
            self._served.append((entry.range.max, made))
            self.adopt(entry.offer, made)

    def adopt(self, offer: Offer, member: GroupMember) -> None:
        """Have ``member``, which ``offer`` made, join with the group, in the order of these calls."""
        self._adopted.append((offer, member))

    def open(self, store: Store) -> None:
        """Join, on all ranks at once."""
        from hardpoint.parallel.process_group import PrefixStore

        for place, (offer, member) in enumerate(self._adopted):
            with blame(offer):
                own = PrefixStore(f"{self.name}/{self.members[0]}/{place}", store)
                member.init(own, self.rank, self.size, self.name)
            self._joined.append(member)

    def close(self, deadline: float) -> None:
        """Leave, last joined first; without the others where that takes beyond ``deadline`` (time.monotonic)."""
        for member in reversed(self._joined):
            leaving = threading.Thread(target=_carefully, args=(member.close,), daemon=True)
            leaving.start()
            leaving.join(max(0.0, deadline - time.monotonic()))
            if leaving.is_alive():
                _carefully(member.abort)
        self._joined.clear()

    def abort(self) -> None:
        """Leave at once, from any thread; what is under way raises."""
        for member in reversed(self._joined):
            _carefully(member.abort)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        if self.size == 1:
            return x
        with self._together("all_reduce"):
            return self._for(x.shape[0]).all_reduce(x)

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """See Collectives."""
        if self.size == 1:
            return x
        with self._together("all_gather"):
            return self._for(x.shape[0] if rows is None else max(rows)).all_gather(x, rows)

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        if self.size == 1:
            return x
        with self._together("all_gather_columns"):
            return self._for(x.shape[0]).all_gather_columns(x)

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """See Collectives."""
        if self.size == 1:
            return x
        with self._together("reduce_scatter"):
            return self._for(x.shape[0]).reduce_scatter(x, rows)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """See Collectives."""
        if self.size > 1:
            with self._together("broadcast"):
                self._for(x.shape[0]).broadcast(x, root)

    def send(self, x: torch.Tensor, to: int) -> None:
        """See Collectives."""
        with self._together("send"):
            self._for(x.shape[0]).send(x, to)

    def recv(self, x: torch.Tensor, source: int) -> None:
        """See Collectives."""
        with self._together("recv"):
            self._for(x.shape[0]).recv(x, source)

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """See Collectives."""
        if self.size == 1:
            return x
        with self._together("all_to_all"):
            # Ranks have unlike numbers of rows, and must not choose by their own.
            return self._served[0][1].all_to_all(x, send, receive)

    def _for(self, rows: int) -> Communicator:
        """The communicator that serves tensors of so many rows, the same number on every rank."""
        return next(c for most, c in self._served if most is None or rows <= most)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Tell a collective that broke off, most likely since another rank did, from what this rank did wrong."""
        try:
            yield
        except NotImplementedError:
            raise
        except RuntimeError as error:  # all that torch.distributed raises
            raise RankLostError(f"{what} among the ranks {list(self.members)} broke off: {error}") from error


def _sends(kind: type[Communicator]) -> bool:
    return kind.send is not Communicator.send and kind.recv is not Communicator.recv


def _carefully(leave: Callable[[], None]) -> None:
    """Leave a group whatever comes of it: the others are left all the same."""
    try:
        leave()
    except Exception:
        logger.exception("a communicator or kernel could not leave its group")


def alone() -> Parallel:
    """The groups of an engine that has one rank."""
    groups = Groups.at(Coordinates())
    return Parallel(groups.tp, groups.ep, groups.expert_tp, groups.pp)


@dataclass(frozen=True)
class Groups:
    """Every group of this rank, in the order in which they are joined."""

    tp: Group
    ep: Group
    expert_tp: Group
    pp: Group

    @classmethod
    def at(cls, place: Coordinates) -> Self:
        """The groups of the rank at ``place``."""
        return cls(*(Group(name, place.members(name), place.world_rank) for name in GROUPS))

    def parallel(self, backend: str, place: Coordinates, timeout: float) -> Parallel:
        """The groups that layers are constructed with; ``timeout`` is that of a step, in seconds."""
        patience = timeout + _PATIENCE
        return Parallel(self.tp, self.ep, self.expert_tp, self.pp, backend, place.on_one_host, patience)

    def select(self, ctx: Context) -> None:
        """Choose and construct the communicators."""
        for group in self._used:
            group.select(ctx)

    def open(self, store: Store, control: ControlGroup) -> None:
        """Join all, in one order on every rank, and go on where all have. Every rank has voted just before."""
        with control.together():
            for group in self._used:
                group.open(store)

    def close(self) -> None:
        """Leave all, last joined first."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for group in reversed(self._used):
            group.close(deadline)

    def abort(self) -> None:
        """Leave all at once, from any thread, where another rank is gone; a collective under way raises."""
        for group in reversed(self._used):
            group.abort()

    @property
    def _used(self) -> tuple[Group, ...]:
        """Experts that every rank has a slice of are served by ``tp``."""
        return (self.tp, self.ep, self.expert_tp, self.pp) if self.ep.size > 1 else (self.tp, self.pp)
