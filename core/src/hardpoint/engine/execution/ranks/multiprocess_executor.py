"""Ranks in processes of this host, one each."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from hardpoint.engine.blueprint import Blueprint
from hardpoint.engine.execution.ranks.hang import describe
from hardpoint.engine.execution.ranks.meeting import meeting_place
from hardpoint.engine.execution.ranks.rank_process import RankSpec, serve_rank
from hardpoint.engine.execution.ranks.ranks_executor import PATIENCE, RankLink, RanksExecutor
from hardpoint.engine.processes import child_process
from hardpoint.fork_server import signals_held
from hardpoint.parallel.choices import Choices
from hardpoint_plugin_api import EngineDeadError


class MultiprocessExecutor(RanksExecutor):
    """Starts a process for each rank, and ends them with itself."""

    def __init__(self, blueprint: Blueprint) -> None:
        """Start the ranks and wait until they are loaded. Raises what the first of them raises, and EngineDeadError."""
        config, choices = blueprint.config, Choices.of(blueprint)
        # A file, and no port that others reach: and torch's TCP store asks the name server about each connection.
        # Kept while the ranks live, since some collective libraries go back to it whenever two ranks first talk.
        self._folder: TemporaryDirectory[str] | None = None
        if config.rendezvous is not None:
            store = ""
        elif config.topology.shares_experts:
            store = str(meeting_place(config, "store"))
        else:
            self._folder = TemporaryDirectory(prefix="hardpoint-ranks-", ignore_cleanup_errors=True)
            store = str(Path(self._folder.name) / "store")
        self.processes: list[ProcessRank] = []
        try:
            for number in range(config.topology.size):
                place = config.topology.on_this_host(number)
                spec = RankSpec(config, place, choices, store)
                with signals_held():  # an interrupt finds the rank in the list
                    self.processes.append(ProcessRank.start(spec))
        except BaseException:
            for rank in self.processes:
                rank.end()
            self._clean_up()
            raise
        super().__init__(config, self.processes)

    def give_up(self, reason: str) -> EngineDeadError:
        """See RanksExecutor."""
        lost = super().give_up(reason)
        self._clean_up()
        return lost

    def _clean_up(self) -> None:
        """Remove the folder, unless it is that of several replicas."""
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def pids(self) -> Sequence[int]:
        """The ranks' processes, in their order."""
        return [rank.process.pid or 0 for rank in self.processes]


class ProcessRank(RankLink):
    """A rank in a process of this host."""

    def __init__(
        self, number: int, connection: Connection, process: BaseProcess, crash: child_process.CrashReport
    ) -> None:
        super().__init__(number, connection)
        self.process, self._crash = process, crash
        self._stack: str | None = None
        self._reading = threading.Lock()

    @classmethod
    def start(cls, spec: RankSpec) -> Self:
        """Start the process, which then loads."""
        number = spec.place.rank
        ours, theirs = multiprocessing.Pipe()
        crash = child_process.CrashReport()
        given = (theirs, spec, child_process.log_levels(), os.getpid(), crash.theirs)
        try:
            process = child_process.start(serve_rank, given, f"hardpoint-rank-{number}")
        finally:
            theirs.close()
            crash.theirs.close()
        return cls(number, ours, process, crash)

    @property
    def called(self) -> str:
        """See RankLink."""
        return f"rank {self.number} ({self.process.pid})"

    @property
    def sentinel(self) -> int:
        """See RankLink."""
        return self.process.sentinel

    def join(self, seconds: float) -> None:
        """See RankLink."""
        self.process.join(seconds)

    def end(self) -> None:
        """See RankLink."""
        self.process.kill()
        self.process.join()

    def stack(self) -> str:
        """See RankLink."""
        with self._reading:
            if self._stack is None:
                self._stack = self._crash.read()
            return self._stack

    def ask_stacks(self) -> None:
        """See RankLink."""
        child_process.ask_stack(self.process)

    def doing(self) -> str:
        """See RankLink."""
        child_process.await_end(self.process, PATIENCE)
        return describe(self.stack())

    def obituary(self) -> str:
        """See RankLink."""
        how, hint = child_process.how_it_ended(self.process.exitcode)
        return f"the process of {self.called} {how}: {hint}"
