"""Ranks in processes whose all-to-all over peer memory runs in Triton's interpreter, on memory that they share.

Each rank's memory is a file that all map, each at another address: as GPUs of processes see each other's.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from hardpoint.engine.processes import child_process
from hardpoint.parallel.process_group import FileStore, Store
from hardpoint_plugin_api import All2AllWorkload
from tests.kernels.interpreter import interpret
from tests.support.peer_steps import Step, by_own_experts

T = TypeVar("T")
SECONDS = 60.0


class MappedPeers:
    """As PeerMemory: the addresses of all ranks' memory, in ``folder``."""

    folder = Path()

    def __init__(self, own: torch.Tensor, store: Store, rank: int, world: int, seconds: float, instead: str) -> None:
        self._store, self._rank, self._world = store, rank, world
        store.set(f"memory/{rank}", "filled")
        store.wait([f"memory/{other}" for other in range(world)])
        self._maps = [_mapped(self.folder, other, own.numel()) for other in range(world)]
        self.pointers = tuple(own.data_ptr() if other == rank else m.data_ptr() for other, m in enumerate(self._maps))

    def close(self) -> None:
        """As PeerMemory."""
        self._store.set(f"left/{self._rank}", "yes")
        self._store.wait([f"left/{rank}" for rank in range(self._world)])


def _mapped(folder: Path, rank: int, size: int) -> torch.Tensor:
    return torch.from_file(str(folder / f"memory{rank}"), shared=True, size=size, dtype=torch.uint8)


class _Resources:
    """The resources of one rank: one key, in a file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def declare(self, key: str, nbytes: int, *, scope: str) -> None:
        assert scope == "collective"
        (self._folder / f"memory{self._rank}").write_bytes(bytes(nbytes))
        self._nbytes = nbytes

    def get(self, key: str) -> torch.Tensor:
        """As an engine's: memory of inference mode."""
        with torch.inference_mode():
            return _mapped(self._folder, self._rank, self._nbytes)


@dataclass(frozen=True)
class Given:
    """The order to each rank. ``first_meeting``: the number of the meetings that came before."""

    workload: All2AllWorkload
    max_tokens: int
    first_meeting: int = 0
    programs: int = 3


def on_ranks(given: Given, folder: Path, act: Callable[[int, Any], T]) -> list[T]:
    """The results of ``act(rank, all2all)`` on each rank. ``act`` must be a function of a module."""
    world = given.workload.ranks or 1
    links, started = list[Connection](), []
    try:
        for rank in range(world):
            ours, theirs = Pipe()
            links.append(ours)
            started.append(child_process.start(_serve, (theirs, rank, given, folder, act), f"rank-{rank}"))
            theirs.close()
        results: dict[int, T] = {}
        until = time.monotonic() + SECONDS
        while len(results) < world:
            left = [link for rank, link in enumerate(links) if rank not in results]
            ready = wait_for(left, until - time.monotonic())
            assert ready, f"ranks {[rank for rank in range(world) if rank not in results]} wait in vain"
            for link in ready:
                assert isinstance(link, Connection)
                error, result = link.recv()
                assert not error, error
                results[links.index(link)] = result
        return [results[rank] for rank in range(world)]
    finally:
        for process in started:
            process.kill()
            process.join()


def _serve(link: Connection, rank: int, given: Given, folder: Path, act: Callable[[int, Any], object]) -> None:
    interpret()
    from hardpoint_cuda import peer_all2all

    try:
        replaced: Any = peer_all2all
        replaced.PeerMemory, replaced.PROGRAMS = MappedPeers, given.programs
        MappedPeers.folder = folder
        group = SimpleNamespace(size=given.workload.ranks, rank=rank)
        ctx: Any = SimpleNamespace(
            limits=SimpleNamespace(max_tokens=given.max_tokens),
            parallel=SimpleNamespace(tp=group, ep=group, timeout=30.0),
            resources=_Resources(folder, rank),
        )
        made = peer_all2all.PeerAll2All(ctx, given.workload)
        store, world = FileStore(str(folder / "store"), -1), given.workload.ranks or 1
        with torch.inference_mode():
            made.init(store, rank, world, "ep")
        if given.first_meeting:
            _begin_at(made, given, world)
            store.set(f"begun/{rank}", "yes")
            store.wait([f"begun/{other}" for other in range(world)])
        with np.errstate(over="ignore"), torch.inference_mode():
            link.send(("", act(rank, made)))
    except BaseException:
        link.send((traceback.format_exc(), None))


@torch.inference_mode()
def _begin_at(made: Any, given: Given, world: int) -> None:
    """As after so many meetings of all programs."""
    at, programs = made.layout, given.programs
    for start, count in ((at.flags, world * programs), (at.meetings, programs)):
        made._memory[start:][: 4 * count].view(torch.int32).fill_(given.first_meeting)


def take_steps(rank: int, made: Any, steps: Sequence[Step]) -> list[Any]:
    """The results of one rank, as arrays of float64. Now and then it waits, so that others are ahead of it."""
    pause, results = random.Random(rank), []
    for step in steps:
        if step.is_expected:
            made.expect(step.rows)
        time.sleep(pause.random() * 0.03)
        scales = None if step.scales is None else step.scales[rank]
        sent = made.dispatch(step.x[rank], scales, step.ids[rank], step.weights[rank])
        most = max(1, *step.rows) if step.is_expected else made._most_tokens
        assert sent.x.shape == (made._ranks * most, step.x[rank].shape[1])
        assert sent.x.dtype == step.x[rank].dtype
        time.sleep(pause.random() * 0.03)
        tokens = sent.x if sent.scales is None else sent.x.float() * sent.scales
        dtype = getattr(torch, made.workload.dtype)
        y = by_own_experts(tokens, sent.ids, sent.weights, rank * made._own, dtype)
        sent.x.fill_(99) if sent.x.dtype == torch.int8 else sent.x.fill_(float("nan"))
        out = torch.full(step.x[rank].shape, float("nan"), dtype=dtype)
        made.combine(y, sent.handle, out)
        results.append(out.double().numpy())
    return results


def wait_for_nobody(rank: int, made: Any) -> float:
    """Rank 0 dispatches alone and leaves a little later: how long the dispatch takes."""
    if rank:
        time.sleep(1.0)
        return 0.0
    import threading

    threading.Timer(0.3, made.abort).start()
    began = time.monotonic()
    made.expect([1] * made._ranks)
    made.dispatch(torch.ones(1, made._hidden), None, torch.zeros(1, made._top_k).int(), torch.ones(1, made._top_k))
    return time.monotonic() - began
