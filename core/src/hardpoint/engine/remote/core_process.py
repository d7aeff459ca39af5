"""A core in a process of its own: how it is started, talked to, watched and ended.

Each side has a thread that always reads, and the front end one that writes, so that neither side waits for the other.
Each side sees at once when the other is gone.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection  # whose exit handler, which waits for children, runs after ours
from queue import SimpleQueue
from typing import cast

from hardpoint.config import EngineConfig
from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.calls import Answer, Answers, Stop
from hardpoint.engine.processes.child import Child
from hardpoint.engine.remote.core_loop import run_core
from hardpoint.engine.remote.messages import Command, Ended, Ready, Report
from hardpoint.engine.remote.remote_core import CLOSE_SECONDS
from hardpoint.garbage_collection import keep_what_is_there
from hardpoint_plugin_api import EngineDeadError

logger = logging.getLogger(__name__)

CLOSED = "the engine is closed"
"""The message of EngineDeadError where the caller, or the end of its program, closed the engine."""


RunCore = Callable[[EngineConfig, SimpleQueue[Command], Callable[[Report | Answer], None]], None]
"""Builds a core and serves commands, as run_core does. Must be picklable."""


class ProcessLink:
    """A core in a process of this program."""

    def __init__(self, config: EngineConfig, run: RunCore = run_core) -> None:
        """Start the process, which then loads. Raises HardpointError where a script's lack of a guard forbids it."""
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.answers = Answers()
        self._lost: EngineDeadError | None = None
        self._hung: str | None = None
        self._ready = self._closed = False
        self._closing, self._owner = threading.Lock(), os.getpid()
        self._config = config
        self._child = Child("hardpoint-core", _serve, config, run)
        self._reader = threading.Thread(target=self._read, name="hardpoint-core-reader", daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def send(self, command: Command) -> None:
        """Queue ``command`` for the thread that writes."""
        self._child.send(command)

    @property
    def lost(self) -> EngineDeadError | None:
        """The reason why the core is gone; None while it runs."""
        return self._lost

    def give_up(self, reason: str) -> None:
        """End a core that does not answer; Ended follows, with ``reason`` and what the core was doing."""
        self._hung = reason
        child_process.abort(self._child.process)

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """Let the core close, and kill its process where that takes longer than ``deadline`` seconds. A core that is
        still loading is killed at once. Closing twice is once."""
        if os.getpid() != self._owner:  # a fork of the program has no say
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            self._child.send(Stop())
            try:
                self._reader.join(deadline if self._ready else 0)
            finally:  # an interrupt while waiting included
                if self._reader.is_alive():
                    self._child.process.kill()
                    self._reader.join()
                self._child.close()

    def _read(self) -> None:
        """Pass reports on until the process has ended, in whatever way."""
        for report in cast("Iterator[Report | Answer]", self._child.received()):
            if isinstance(report, Answer):
                self.answers.take(report)
            elif isinstance(report, Ended):  # it says itself why it goes
                self._lose(report.error, report.stack)
            else:
                self._ready = self._ready or isinstance(report, Ready)
                self.reports.put(report)
        stack = self._child.stack
        if stack and not self._closed:
            logger.error("the engine's process (%s) crashed:\n%s", self._child.process.pid, stack)
        if self._lost is None:
            self._lose(EngineDeadError(CLOSED if self._closed else self._obituary(stack)), stack)

    def _lose(self, error: EngineDeadError, stack: str) -> None:
        self._lost = error
        self.answers.lose(error)
        self.reports.put(Ended(error, stack))

    def _obituary(self, stack: str) -> str:
        """How the process ended, and what to do about it."""
        code = self._child.process.exitcode
        how, hint = child_process.how_it_ended(code)
        if stack:
            hint = "its stack is in the log"
        if code is not None and code >= 0 and not self._ready:
            hint += f"; a script that builds an engine must do so under {child_process.GUARD}"
        remedy = "; build a new engine" if self._ready and not self._config.restarts_engine else ""
        if self._hung is not None:
            return f"{self._hung}, so that its process ({self._child.process.pid}) was ended{remedy}"
        return f"the engine's process ({self._child.process.pid}) {how}: {hint}{remedy}"


def _serve(connection: Connection, send: child_process.Sender, parent: int, config: EngineConfig, run: RunCore) -> None:
    """The target of the core's process."""
    commands: SimpleQueue[Command] = SimpleQueue()
    ready, closed = threading.Event(), threading.Event()
    listener = threading.Thread(target=_listen, args=(connection, commands, parent, ready, closed), daemon=True)
    listener.start()

    def report(message: Report | Answer) -> None:
        if isinstance(message, Ready):
            keep_what_is_there()
            ready.set()
        send(message)

    run(config, commands, report)
    closed.set()


def _listen(
    connection: Connection,
    commands: SimpleQueue[Command],
    parent: int,
    ready: threading.Event,
    closed: threading.Event,
) -> None:
    """Pass commands on until the front end is gone; then see to it that this process ends."""
    child_process.listen(connection, parent, commands.put)  # type: ignore[arg-type]  # nothing else is sent
    commands.put(Stop())
    if not ready.is_set() or not closed.wait(CLOSE_SECONDS):
        os._exit(1)
