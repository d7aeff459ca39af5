"""Several ranks in threads of this process: nothing in an engine is global, so a thread is as good as a process.

Sweeps over many engines run so, since a process takes seconds to start; tests of processes have processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

from torch._C._distributed_c10d import HashStore

from hardpoint import LLM
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import Blueprint
from hardpoint.engine.execution.ranks import multiprocess_executor
from hardpoint.engine.execution.ranks.meeting import meeting_place
from hardpoint.engine.execution.ranks.rank_process import RankSpec
from hardpoint.engine.execution.ranks.ranks_executor import RanksExecutor
from hardpoint.engine.execution.ranks.torchrun_executor import ThreadRank
from hardpoint.engine.remote.remote_core import ThreadLink
from hardpoint.engine.remote.sharing_replicas import SharingReplicas
from hardpoint.parallel.choices import Choices
from hardpoint.parallel.process_group import FileStore, Store
from tests.support.engines import SMALL, small_llm

T = TypeVar("T")


class ThreadsExecutor(RanksExecutor):
    """Every rank in a thread; otherwise like ranks in processes. ``alive`` are those of all engines."""

    alive: ClassVar[weakref.WeakSet[ThreadsExecutor]] = weakref.WeakSet()

    def __init__(self, blueprint: Blueprint) -> None:
        config, choices = blueprint.config, Choices.of(blueprint)
        topology = config.topology
        specs = [RankSpec(config, topology.on_this_host(rank), choices) for rank in range(topology.size)]
        self.threads = start_threads(
            specs, FileStore(str(meeting_place(config, "store")), -1) if config.meeting else None
        )
        super().__init__(config, self.threads)
        self.alive.add(self)

    @property
    def blueprints(self) -> list[Blueprint]:
        """The order that each rank was built from."""
        found = [thread._rank.blueprint for thread in self.threads]
        return [blueprint for blueprint in found if blueprint is not None]


def start_threads(specs: Sequence[RankSpec], store: Store | None = None) -> list[ThreadRank]:
    """Ranks that meet each other, and those of other calls that are given the same store."""
    store = store or HashStore()
    return [ThreadRank(spec, store) for spec in specs]


@contextmanager
def ranks_in_threads(folder: Path | str, ranks: int, **settings: Any) -> Iterator[LLM]:
    """An engine of ``ranks`` ranks; ``settings`` override those of ``small_llm``."""
    with (
        patch.object(multiprocess_executor, "MultiprocessExecutor", ThreadsExecutor),
        small_llm(folder, tensor_parallel_size=ranks, **settings) as llm,  # type: ignore[arg-type]  # demo has no folder
    ):
        yield llm


@contextmanager
def sharing_replicas(folder: Path | str, replicas: int = 2, **settings: Any) -> Iterator[SharingReplicas]:
    """Replicas that share experts, with cores and ranks in threads."""
    given = SMALL | {"data_parallel_size": replicas, "enable_expert_parallel": True} | settings
    with patch.object(multiprocess_executor, "MultiprocessExecutor", ThreadsExecutor):
        core = SharingReplicas(ThreadLink, EngineConfig.create(model=str(folder), **given))
        core.wait_until_ready()
        try:
            yield core
        finally:
            core.close()


def on_each(world: int, run: Callable[[int, Store], T]) -> list[T]:
    """The results of ``run`` on each of ``world`` ranks, given its number and their meeting place."""
    store = HashStore()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: run(rank, store), range(world)))
