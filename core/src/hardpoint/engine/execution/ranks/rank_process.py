"""One rank at work: what it is given, what it is told, what it says, and the loop in which it serves."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, cast

from hardpoint.config import EngineConfig
from hardpoint.engine.execution.ranks.hang import own_stacks
from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.calls import Answer, Call, Failure, Logged, Stop
from hardpoint.engine.scheduling.step import StepInput, StepOutput
from hardpoint.garbage_collection import keep_what_is_there
from hardpoint.parallel.choices import Choices
from hardpoint.parallel.topology import Coordinates
from hardpoint.plugin_host.blame import name_culprit

if TYPE_CHECKING:
    from hardpoint.engine.blueprint import Blueprint
    from hardpoint.engine.execution.runner import Ticket
    from hardpoint.engine.execution.worker import Worker, WorkerFacts
    from hardpoint.parallel.process_group import Store

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""How long a rank whose parent is gone may take to end in order."""


@dataclass(frozen=True)
class RankSpec:
    """The order to build a rank. ``choices`` are the parent's, which every rank must come to as well; without any,
    all must come to the same.

    ``store`` is the file, in a folder of its own on this host, by which the ranks meet; empty where they meet at no
    file.
    """

    config: EngineConfig
    place: Coordinates
    choices: Choices | None = None
    store: str = ""


@dataclass(frozen=True)
class RankReady:
    """The rank is loaded."""

    facts: WorkerFacts


@dataclass(frozen=True)
class RankFailed:
    """The rank raised what no rank survives: the others wait for it in vain."""

    failure: Failure


@dataclass(frozen=True)
class TellStacks:
    """Say what each thread of the process does. It is answered where the rank itself hangs."""


@dataclass(frozen=True)
class Stacks:
    """The answer, see ``hang``."""

    text: str


RankCommand = StepInput | Call | Stop
RankReport = RankReady | RankFailed | StepOutput | Answer | Logged | Stacks


def serve_rank(
    connection: Connection, spec: RankSpec, levels: dict[str, int], parent: int, crashes: Connection
) -> None:
    """The target of a rank's process, until it is told to stop or its parent is gone."""
    from hardpoint.engine.execution.ranks.meeting import servers_store

    send = child_process.Sender(connection)
    child_process.settle_in(send, levels, crashes)
    rank = Rank(spec)
    end_with_parent(rank, connection, parent, send)

    def report(message: RankReport) -> None:
        if isinstance(message, RankReady):
            keep_what_is_there()
        send(message)

    rank.run(lambda: file_store(spec.store) if spec.store else servers_store(spec.config), report)
    # All that holds resources was closed. Taking torch's modules apart would take a second more.
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(0)


def file_store(path: str) -> Store:
    """The store in a file that ranks share.

    Raises OSError at once where the folder is gone; torch would try for five minutes, with Python's lock held.
    """
    from hardpoint.parallel.process_group import FileStore

    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return FileStore(path, -1)


@dataclass
class Rank:
    """A rank, in whatever process or thread; ``run`` returns when it is told to stop, or has failed."""

    spec: RankSpec
    commands: SimpleQueue[RankCommand | None] = field(default_factory=SimpleQueue)
    serving: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    was_told: threading.Event = field(default_factory=threading.Event)
    """Set where it was told to stop."""
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set where the parent was gone before it told the rank to stop."""
    blueprint: Blueprint | None = None

    def run(self, meet: Callable[[], Store], send: Callable[[RankReport], None]) -> None:
        """Meet the other ranks at what ``meet`` returns, load, serve, close; ``send`` takes what there is to say."""
        try:
            worker = self._start(meet())
            send(RankReady(worker.facts))
            self.serving.set()
            serve(worker, self.commands, send if self.spec.place.answers else None, send)
            worker.close()
        except Exception as error:
            from hardpoint.engine.blueprint import suspects

            if self.blueprint is not None:
                name_culprit(error, self.blueprint.plugins, suspects(self.blueprint))
            send(RankFailed(Failure.of(error)))
        self.closed.set()

    def _start(self, store: Store) -> Worker:
        """See that all ranks chose alike, and load."""
        from hardpoint.engine.blueprint import draw
        from hardpoint.engine.execution.worker import Worker
        from hardpoint.parallel.choices import check_equal, check_same_config
        from hardpoint.parallel.control import ControlGroup

        config, place, wanted = self.spec.config, self.spec.place, self.spec.choices
        world, patience = place.topology.world, float(config.core_start_timeout)
        control = ControlGroup.join(store, place.world_rank, world, patience, on_one_host=place.on_one_host)
        if wanted is None:
            check_same_config(control, config)
        with control.together():
            self.blueprint = draw(config, place=place)
        check_equal(control, Choices.of(self.blueprint), place.topology, wanted)
        return Worker.start(self.blueprint, control=control, store=store)

    def listen(self, connection: Connection, parent: int, send: Callable[[RankReport], None]) -> bool:
        """Take commands until ``connection`` ends, or the process ``parent`` does; returns whether that did."""

        def take(command: object) -> None:
            if isinstance(command, TellStacks):
                send(Stacks(own_stacks()))
                return
            if isinstance(command, Stop):
                self.was_told.set()
            self.commands.put(cast("RankCommand", command))

        return child_process.listen(connection, parent, take)

    def abort(self) -> None:
        """Break off, from another thread, what waits for other ranks."""
        if self.blueprint is not None:
            self.blueprint.groups.abort()


def serve(
    worker: Worker,
    commands: SimpleQueue[RankCommand | None],
    collected: Callable[[StepOutput], None] | None,
    answer: Callable[[Answer], None],
) -> None:
    """Run what comes until it is Stop. The rank that answers passes each step's output to ``collected``.

    Calls run between steps. Errors of a step are raised here; an error of a call is the call's answer.
    """
    from hardpoint.engine.execution.rank_verbs import on_rank

    tickets: SimpleQueue[Ticket | None] = SimpleQueue()
    failures: list[Exception] = []
    arguments = (worker, tickets, collected, failures, commands)
    collector = threading.Thread(target=_collect, args=arguments, name="hardpoint-rank-collector", daemon=True)
    if collected is not None:
        collector.start()
    try:
        while not isinstance(command := commands.get(), Stop):
            if failures:
                raise failures[0]
            if isinstance(command, Call):
                try:
                    done = Answer(command.number, on_rank(command.verb, worker))
                except Exception as error:
                    done = Answer(command.number, failure=Failure.of(error))
                answer(done)
                continue
            assert command is not None, "a failure wakes this loop"
            ticket = worker.runner.submit(command)
            if collected is not None:
                tickets.put(ticket)
    finally:
        tickets.put(None)
    if collected is not None:  # who closes the connection must find nobody who writes to it
        collector.join(CLOSE_SECONDS)


def _collect(
    worker: Worker,
    tickets: SimpleQueue[Ticket | None],
    collected: Callable[[StepOutput], None],
    failures: list[Exception],
    commands: SimpleQueue[RankCommand | None],
) -> None:
    """Wait for steps in their order until there is no ticket more. An error is the last of ``failures``, and wakes who
    waits for commands.

    In a thread of its own: a rank that waited for a step itself would not submit the next one until it has ended.
    """
    try:
        with worker.blueprint.platform.current():
            while (ticket := tickets.get()) is not None:
                collected(worker.runner.collect(ticket))
    except Exception as error:
        failures.append(error)
        commands.put(None)


def end_with_parent(
    rank: Rank,
    connection: Connection,
    parent: int,
    send: Callable[[RankReport], None],
    why: Callable[[bool], Exception] | None = None,
) -> None:
    """Pass commands on to ``rank`` until the parent is gone; then see to it that this process ends.

    ``why``: the error that it ends with where it was not told to stop, given whether the process ``parent`` is gone: it
    may be another one than that which commands.
    """

    def listen() -> None:
        is_orphan = rank.listen(connection, parent, send)
        if not rank.was_told.is_set():
            rank.abandoned.set()
            if why is not None:
                error = why(is_orphan)
                logger.error("rank %d ends: %s", rank.spec.place.rank, error)
                send(RankFailed(Failure.of(error)))
        rank.commands.put(Stop())
        if rank.spec.store:  # a parent that was killed has left it
            shutil.rmtree(os.path.dirname(rank.spec.store), ignore_errors=True)
        if not rank.serving.is_set() or not rank.closed.wait(CLOSE_SECONDS):
            os._exit(1)

    threading.Thread(target=listen, name="hardpoint-rank-listener", daemon=True).start()
