"""Several ranks in threads of the trial's process: nothing in an engine is global, so a thread is as good as a process.

Each rank has a device of its own, but on the host, which all share.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

import torch
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but not for mypy

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject, TrialResources
from hardpoint.conformance.trials import Finding
from hardpoint.context import Context
from hardpoint.parallel.groups import CLOSE_SECONDS, Group, alone
from hardpoint.parallel.process_group import PrefixStore, Store
from hardpoint_plugin_api import Communicator, CommunicatorWorkload

SECONDS = 20.0
"""How long what ranks do together in one trial may take before it counts as hung."""

_GRACE = 5.0
"""How long ranks may take to come back once their communicators are told to leave."""

_RECORDER = "TORCH_FR_BUFFER_SIZE"
"""How many of the last collectives torch's flight recorder keeps. Releases up to 2.11 at least enter a group in its map
without the recorder's lock, so that two ranks in threads of one process end it now and then (SIGSEGV in their first
collective)."""

T = TypeVar("T")
R = TypeVar("R")
ContextOf = Callable[[torch.device], Context]


class HungError(Exception):
    """Ranks wait for each other in vain."""


def worlds(plan: Plan) -> tuple[int, ...]:
    """How many ranks are tried. A group of one rank has no communicator."""
    return (2, 3) if plan.level == "quick" else (2, 3, 4)


def too_few_devices(site: Site, world: int) -> Finding | None:
    """The finding where a group of ``world`` ranks cannot be made here."""
    info = site.platform.info
    if site.device.type == "cpu" or info.count >= world:
        return None
    return Finding(skipped=f"{world} ranks take as many devices, and there are {info.count}")


def device_of(site: Site, rank: int) -> torch.device:
    """The device of a rank, made active for the calling thread."""
    return site.device if site.device.type == "cpu" else site.platform.activate(rank)


def together(
    world: int, run: Callable[[int], T], break_off: Callable[[], None], seconds: float | None = None
) -> list[T]:
    """The results of ``run`` on each rank. ``break_off`` is called where one raises, or where time is up.

    torch records nothing of it, unless the environment asks for that. Raises the first rank's error, and HungError.
    """
    seconds = seconds or SECONDS
    os.environ.setdefault(_RECORDER, "0")
    ended: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()

    def one(rank: int) -> None:
        try:
            with torch.inference_mode():
                ended.put((rank, run(rank), None))
        except BaseException as error:  # whatever it is, the trial's own thread is to know
            ended.put((rank, None, error))

    for rank in range(world):
        threading.Thread(target=one, args=(rank,), name=f"rank {rank}", daemon=True).start()
    results: dict[int, T | None] = {}
    first: BaseException | None = None
    deadline, is_broken = time.monotonic() + seconds, False
    while len(results) < world:
        try:
            rank, result, error = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            if is_broken:
                break
            first = first or HungError(
                f"the ranks {[r for r in range(world) if r not in results]} of {world} did not come back in {seconds} s"
            )
        else:
            results[rank], first = result, first or error
        if first and not is_broken:
            is_broken, deadline = True, time.monotonic() + _GRACE
            break_off()
    if first:
        raise first
    return [cast(T, results[rank]) for rank in range(world)]


@dataclass(frozen=True)
class Member:
    """One rank of a group: its communicator, where its tensors are, and a store for what else joins the group."""

    rank: int
    world: int
    communicator: Communicator
    device: torch.device
    context: Context
    store: Store


@dataclass(frozen=True)
class CommunicatorGroup:
    """Groups of ``workload.ranks`` ranks that are served by communicators of class ``kind``, a contribution's."""

    subject: Subject
    kind: type[Communicator]
    workload: CommunicatorWorkload
    timeout: float | None = None
    """Timeout of a collective in seconds; by default, it is longer than the trial's."""

    def context(self, device: torch.device) -> Context:
        """A build context of one rank."""
        site = self.subject.site
        parallel = replace(alone(), backend=site.platform.collectives, timeout=self.timeout or 4 * SECONDS)
        made = replace(site.context(self.workload.dtype or "float32", device=device), parallel=parallel)
        return made.for_plugin(self.subject.offer.plugin)

    def run(self, act: Callable[[Member], T], *, close: bool = True, seconds: float | None = None) -> list[T]:
        """Construct, join, act and leave, on every rank at once, as an engine does."""
        world = self.workload.ranks or 1
        store, constructed = HashStore(), threading.Barrier(world)
        joined: list[Communicator] = []

        def one(rank: int) -> T:
            device = device_of(self.subject.site, rank)
            context = self.context(device)
            made = self.kind(context, self.workload)
            resources = cast(TrialResources, context.resources)
            resources.allocate_collective(device)
            resources.allocate(device)
            constructed.wait()
            joined.append(made)
            made.init(PrefixStore("trial", store), rank, world, self.workload.parallel or "tp")
            result = act(Member(rank, world, made, device, context, PrefixStore("adopted", store)))
            if close:
                made.close()
            return result

        def break_off() -> None:
            constructed.abort()
            abort(joined)

        return together(world, one, break_off, seconds)


def in_group(
    site: Site, world: int, make: Callable[[Context], T], act: Callable[[int, T, Context], R], context: ContextOf
) -> list[R]:
    """The results of ``act`` on each of ``world`` ranks. It gets the rank, ``make``'s result there, and the context.

    ``context`` makes a build context for a device; on each rank it is given a group ``tp`` of all, whose collectives
    are the reference's. Resources that ``make`` has the context adopt join the group with it.
    """
    store, constructed = HashStore(), threading.Barrier(world)
    joined: list[Group] = []

    def one(rank: int) -> R:
        device, nobody = device_of(site, rank), alone()
        group = Group("tp", tuple(range(world)), rank)
        backend, timeout = site.platform.collectives, 4 * SECONDS
        parallel = replace(nobody, tp=group, backend=backend, timeout=timeout)
        ctx = replace(context(device), parallel=parallel)
        group.select(ctx)
        made = make(ctx)
        ctx.resources.allocate_collective(device)
        ctx.resources.allocate(device)
        constructed.wait()
        joined.append(group)
        group.open(PrefixStore("trial", store))
        result = act(rank, made, ctx)
        group.close(time.monotonic() + CLOSE_SECONDS)
        return result

    def break_off() -> None:
        constructed.abort()
        abort(joined)

    return together(world, one, break_off)


def abort(communicators: Sequence[Communicator | Group]) -> None:
    """Abort all communicators at once, each from a thread of its own."""
    for communicator in communicators:
        threading.Thread(target=communicator.abort, daemon=True).start()
