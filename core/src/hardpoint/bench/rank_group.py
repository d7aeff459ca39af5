"""Ranks of this host that are measured: a process for each, its groups, and how fast the link between them is."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import torch

from hardpoint.config import EngineConfig
from hardpoint.context import Context
from hardpoint.engine.blueprint import draw
from hardpoint.engine.processes import child_process
from hardpoint.parallel.groups import CLOSE_SECONDS, Group, alone
from hardpoint.parallel.process_group import FileStore, PrefixStore
from hardpoint.parallel.topology import Coordinates, Topology
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_plugin_api import CommunicatorWorkload, ConfigError, HardpointError, Platform

TIMEOUT = 120.0
"""Seconds after which a collective counts as failed."""

_LINK_SIZES = (256 * 2**10, 16 * 2**20)
_LINK_ROUNDS = 30
R = TypeVar("R")
Run = Callable[[], object]


@dataclass(frozen=True)
class RankSettings:
    """The order to build each rank. ``tokens``: the most of a rank at once, for which memory is to be there."""

    ranks: int
    dtype: str
    platform: str | None = None
    communicator: str | None = None
    all2all: str | None = None
    tokens: int = 0

    @property
    def config(self) -> EngineConfig:
        """An engine's settings that choose so."""
        named = {"platform": self.platform, "communicator": self.communicator, "all2all_backend": self.all2all}
        given = {name: value for name, value in named.items() if value is not None}
        config = EngineConfig.create(model="demo", dtype=self.dtype, **given)
        most = max(config.max_num_batched_tokens, self.tokens * self.ranks)
        return EngineConfig.create(model="demo", dtype=self.dtype, max_num_batched_tokens=most, **given)


@dataclass(frozen=True)
class BenchRank:
    """One rank of the group, in its process. ``peer`` are torch.distributed's collectives by the platform's backend."""

    rank: int
    settings: RankSettings
    ctx: Context
    platform: Platform
    peer: Group
    folder: Path

    def in_turns(self, runs: Sequence[Run], rounds: int, times: int) -> list[float]:
        """Seconds of a call of each of ``runs``, in the median of ``rounds``. Each is called ``times`` in a row.

        All ranks begin a row together.
        """
        taken: list[list[float]] = [[] for _ in runs]
        for run in runs:  # what a first call sets up
            run()
        for _ in range(rounds):
            for run, seconds in zip(runs, taken, strict=True):
                self.meet()
                began = time.perf_counter()
                for _ in range(times):
                    run()
                self.platform.synchronize()
                seconds.append((time.perf_counter() - began) / times)
        return [statistics.median(seconds) for seconds in taken]

    def meet(self) -> None:
        """Wait until all ranks are here, and their devices idle."""
        self.peer.all_reduce(torch.zeros(1, device=self.ctx.torch_device))
        self.platform.synchronize()

    def group(self, name: str) -> Group:
        """A new group of all ranks, which the platform's choice, or what the settings name, will serve once opened."""
        group = Group(name, self.peer.members, self.rank)
        group.select(self.ctx)
        return group

    def context(self, group: Group) -> Context:
        """The build context of a layer whose experts are divided among the ranks of ``group``."""
        parallel = replace(self.ctx.parallel, tp=group, ep=group)
        return replace(self.ctx, parallel=parallel)

    def open(self, group: Group, name: str) -> None:
        """Join, with the memory that was declared. ``name`` is the group's alone."""
        self.ctx.resources.allocate_collective(self.ctx.torch_device)
        self.ctx.resources.allocate(self.ctx.torch_device)
        group.open(PrefixStore(name, FileStore(str(self.folder / "store"), -1)))

    def link(self) -> float:
        """Bytes per second from rank 0 to rank 1: the best of some sizes.

        Where the device is the host itself, by a copy of what the other process has just written; elsewhere by
        ``send`` and ``recv`` of the peer.
        """
        on_host = not self.platform.info.accelerator
        return max((self._copied if on_host else self._sent)(size) for size in _LINK_SIZES)

    def _copied(self, size: int) -> float:
        path = str(self.folder / f"link{size}")
        if self.rank == 0:
            Path(path).write_bytes(bytes(size))
        self.meet()
        shared = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        own, best = torch.empty(size, dtype=torch.uint8), float("inf")
        for number in range(_LINK_ROUNDS):
            if self.rank == 0:
                shared.fill_(number)
            self.meet()
            began = time.perf_counter()
            own.copy_(shared)
            best = min(best, time.perf_counter() - began)
            self.meet()
        return self._of_rank_1(size / best)

    def _sent(self, size: int) -> float:
        x, best = torch.zeros(size, dtype=torch.uint8, device=self.ctx.torch_device), float("inf")
        for _ in range(_LINK_ROUNDS):
            self.meet()
            began = time.perf_counter()
            if self.rank == 0:
                self.peer.send(x, 1)
            elif self.rank == 1:
                self.peer.recv(x, 0)
            self.platform.synchronize()
            best = min(best, time.perf_counter() - began)
        return self._of_rank_1(size / best)

    def _of_rank_1(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float32, device=self.ctx.torch_device)
        self.peer.broadcast(found, 1)
        return float(found)


def on_ranks(settings: RankSettings, measure: Callable[[BenchRank], R]) -> R:
    """The result of ``measure`` on rank 0. It runs on every rank, each a process of its own. All end with the call.

    ``measure`` must be a function of a module, or a partial of one. Raises HardpointError with the first rank's error.
    """
    with tempfile.TemporaryDirectory() as folder:
        started, links = [], list[Connection]()
        try:
            for rank in range(settings.ranks):
                ours, theirs = multiprocessing.Pipe()
                links.append(ours)
                given = (theirs, rank, settings, Path(folder), measure)
                started.append(child_process.start(_serve, given, f"bench-rank-{rank}"))
                theirs.close()
            answers = _answers(links)
        finally:
            for process in started:
                process.kill()
                process.join()
            for link in links:
                link.close()
    return answers[0]  # type: ignore[return-value]  # what measure returned


def _answers(links: Sequence[Connection]) -> list[object]:
    found: dict[Connection, object] = {}
    while len(found) < len(links):
        for link in wait([link for link in links if link not in found]):
            assert isinstance(link, Connection)
            try:
                is_error, value = link.recv()
            except EOFError:
                is_error, value = True, "its process has ended"
            if is_error:
                raise HardpointError(f"rank {links.index(link)}: {value}")
            found[link] = value
    return [found[link] for link in links]


def _serve(
    link: Connection, rank: int, settings: RankSettings, folder: Path, measure: Callable[[BenchRank], R]
) -> None:
    try:
        with torch.inference_mode():
            made = _join(rank, settings, folder)
            result = measure(made)
            made.meet()
        link.send((False, result))
        made.peer.close(time.monotonic() + CLOSE_SECONDS)
    except Exception as error:
        link.send((True, f"{type(error).__name__}: {error}"))


def _join(rank: int, settings: RankSettings, folder: Path) -> BenchRank:
    place = Coordinates(Topology(), 0, rank, settings.ranks)
    blueprint = draw(settings.config, place=place)
    platform, ctx = blueprint.platform, blueprint.ctx
    parallel = replace(alone(), backend=platform.collectives, timeout=TIMEOUT)
    ctx = replace(ctx, parallel=parallel)
    made = TorchDistributed(ctx, CommunicatorWorkload(dtype=settings.dtype, parallel="tp", ranks=settings.ranks))
    peer = Group("tp", tuple(range(settings.ranks)), rank, [(None, made)])
    store = FileStore(str(folder / "store"), -1)
    made.init(PrefixStore("peer", store), rank, settings.ranks, "tp")
    return BenchRank(rank, settings, ctx, platform, peer, folder)


def check_ranks(ranks: int, platform: str | None) -> None:
    """Raise ConfigError where the platform has fewer devices than ``ranks``, unless it is the host itself."""
    from hardpoint.plugin_host import discover
    from hardpoint.selection import Settings, choose_platform

    device = choose_platform(discover(), Settings({"platform": platform} if platform else {})).device
    if device.accelerator and device.count < ranks:
        raise ConfigError(f"--ranks {ranks}: each takes a device, and there are {device.count} x {device.name}")
