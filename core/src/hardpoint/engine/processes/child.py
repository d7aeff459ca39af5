"""A process that this one has started and talks to: messages by a pipe, its log records, and how it ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.calls import Logged

logger = logging.getLogger(__name__)

API_NAME = "hardpoint-api-"
"""The beginning of the name of a process that answers HTTP; its number follows."""
_END_SECONDS = 10.0
"""How long a process that has closed its end of the pipe may take to end."""


class Outbox:
    """Sends messages by ``connection`` from a thread of its own, so that no sender waits. Messages after its end are
    dropped."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Queue ``message``, which is read now. Raises what pickle raises."""
        self._waiting.put(pickle.dumps(message))

    def close(self, timeout: float | None = None) -> None:
        """Send what is queued and end the thread; ``timeout``: of waiting for that, in seconds."""
        self._waiting.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (data := self._waiting.get()) is not None:
            try:
                self._connection.send_bytes(data)
            except OSError:  # the other side is gone: whoever reads from it sees that, too
                return


def hang_up(connection: Connection) -> None:
    """End a duplex ``connection`` for both sides: whoever reads from it stops. Closing alone does not wake a reader."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


Serve = Callable[..., None]
"""A child's own function: of its connection, its Sender, its parent's process id, and further arguments."""


class Child:
    """A process that runs ``serve``. One thread reads ``received`` to its end; the rest may be called by any."""

    def __init__(self, name: str, serve: Serve, *args: Any) -> None:
        """Start it. Raises HardpointError where a script's lack of a guard forbids it."""
        self._connection, theirs = multiprocessing.Pipe()
        self._crash = child_process.CrashReport()
        self.stack = ""
        """The stack of a crash, empty where there was none; known once ``received`` has ended."""
        given = (serve, theirs, child_process.log_levels(), os.getpid(), self._crash.theirs, args)
        try:
            self.process = child_process.start(_run, given, name)
        finally:
            theirs.close()
            self._crash.theirs.close()
        self._outbox = Outbox(self._connection, f"{name}-writer")

    def send(self, message: object) -> None:
        """Queue ``message`` for the thread that writes."""
        self._outbox.put(message)

    def received(self) -> Iterator[object]:
        """The messages of the process, until it has ended in whatever way. Its log records are logged here instead."""
        while True:
            # A child of the process may hold its end of the pipe open, so that its own end has to be watched too.
            found = wait([self._connection, self.process.sentinel])
            if self._connection not in found:
                break
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                break
            if isinstance(message, Logged):
                child_process.log_here(message.record)
            else:
                yield message
        self.process.join(_END_SECONDS)
        if self.process.is_alive():  # it closed its end and hangs
            self.process.kill()
            self.process.join()
        self.stack = self._crash.read()

    def close(self) -> None:
        """Free what is left of a process that has ended."""
        self._outbox.close()
        self._connection.close()
        self.process.close()


def _run(
    serve: Serve,
    connection: Connection,
    levels: dict[str, int],
    parent: int,
    crashes: Connection,
    args: tuple[Any, ...],
) -> None:
    send = child_process.Sender(connection)
    child_process.settle_in(send, levels, crashes)
    serve(connection, send, parent, *args)
