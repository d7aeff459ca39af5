"""Processes of an engine's own: how they are started, what they log, and how each side sees that the other is gone.

They are forked from a process without threads and devices that has imported torch, see ``fork_server``.
"""

from __future__ import annotations

import faulthandler
import logging
import logging.handlers
import multiprocessing
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from hardpoint import fork_server
from hardpoint.engine.processes.calls import Logged
from hardpoint.thread_waiting import brief_waits, wait_briefly
from hardpoint_plugin_api import HardpointError

GUARD = 'if __name__ == "__main__":'
"""The guard that a script needs which starts processes."""

MODULES = ("hardpoint.engine.processes.preloaded",)
"""The modules that the fork server of these processes has imported."""


def start(target: Callable[..., object], args: tuple[object, ...], name: str) -> BaseProcess:
    """Start a process that runs ``target(*args)``.

    Raises HardpointError where a script's lack of a guard forbids it.
    """
    started: list[BaseProcess] = []
    try:
        with fork_server.signals_held():
            started.append(fork_server.start(target, args, name, MODULES, brief_waits()))
    except KeyboardInterrupt:  # it was held back until here, and the caller will not know the process
        for process in started:
            process.kill()
            process.join()
        raise
    except RuntimeError as error:
        if "bootstrapping" not in str(error):
            raise
        raise HardpointError(
            "this script starts an engine with a process of its own while it is imported, and every such process "
            f"imports it again; put what the script does under {GUARD}"
        ) from error
    return started[0]


def how_it_ended(exit_code: int | None) -> tuple[str, str]:
    """In words: how a process ended, and where to look for the cause."""
    how, hint = "ended", "what it wrote to stderr says why"
    if exit_code is not None and exit_code < 0:
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        how = f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
        if -exit_code == signal.SIGKILL:
            hint = "the kernel sends that when memory runs out (see dmesg)"
    elif exit_code is not None:
        how = f"ended with exit code {exit_code}"
    return how, hint


def log_levels() -> dict[str, int]:
    """The level of every logger that has one of its own, the root's under the empty name."""
    known = logging.root.manager.loggerDict.items()
    levels = {name: logger.level for name, logger in known if isinstance(logger, logging.Logger) and logger.level}
    return {"": logging.root.level} | levels


def log_here(record: logging.LogRecord) -> None:
    """Log what a child logged, as if it had been logged here."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class CrashReport:
    """The stack that a child leaves when it crashes, by a pipe that it inherits: ``theirs`` is its end."""

    def __init__(self) -> None:
        self._ours, self.theirs = multiprocessing.Pipe(duplex=False)

    def read(self) -> str:
        """The report of the child, which has ended; to be called once, after ``theirs`` was closed."""
        parts = []
        os.set_blocking(self._ours.fileno(), False)
        with suppress(BlockingIOError):  # a process that the child forked holds the pipe open
            while part := os.read(self._ours.fileno(), 2**16):
                parts.append(part)
        self._ours.close()
        return b"".join(parts).decode("ascii", "replace")


_crash_pipes: list[Connection] = []
"""This process's own end: faulthandler writes to it for as long as the process lives."""


def abort(process: BaseProcess, patience: float = 2.0) -> None:
    """Have ``process``, which hangs, leave its stack and end; kill it where it cannot even do that."""
    ask_stack(process)
    await_end(process, patience)


def ask_stack(process: BaseProcess) -> None:
    """Have ``process`` leave its stack, and end."""
    with suppress(ProcessLookupError):
        os.kill(process.pid or 0, signal.SIGABRT)


def await_end(process: BaseProcess, patience: float) -> None:
    """Wait for ``process``, which was asked to end; kill it after ``patience`` seconds."""
    wait([process.sentinel], patience)  # whoever watches it joins it
    process.kill()


class Sender:
    """Sends a child's messages, from any of its threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, message: object) -> None:
        data = pickle.dumps(message)
        with self._lock, suppress(OSError):  # the parent is gone: the listener ends this process
            self._connection.send_bytes(data)


class _Forward(logging.handlers.QueueHandler):
    """Sends log records to the parent, whose handlers and filters decide what becomes of them."""

    def __init__(self, send: Sender) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # enqueue below takes the queue's place
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send(Logged(record))


def settle_in(send: Sender, levels: dict[str, int], crashes: Connection) -> None:
    """The first steps of a child: show its name in lists of processes, leave signals to its parent, leave its stack in
    ``crashes`` if it crashes, log by ``send``."""
    wait_briefly()
    fork_server.show_name(multiprocessing.current_process().name)
    for each in fork_server.GROUP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, fork_server.GROUP_SIGNALS)
    os.set_blocking(crashes.fileno(), False)  # a parent that does not read must not keep it from ending
    _crash_pipes.append(crashes)
    faulthandler.enable(crashes.fileno())
    log_by(send, levels)


def log_by(send: Sender, levels: dict[str, int]) -> None:
    """Have the parent log what this process logs, at ``levels``, see ``log_levels``."""
    logging.root.handlers = [_Forward(send)]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def listen(connection: Connection, parent: int, take: Callable[[object], None]) -> bool:
    """Pass what comes on to ``take``; return when the connection ends, or the parent, a process's number.

    Returns whether the parent is gone: another process may hold its end of the connection open, and send.
    """
    with _watched(parent) as is_gone:
        with suppress(EOFError, OSError):
            while not is_gone() or connection.poll():
                if connection.poll(1.0):
                    take(pickle.loads(connection.recv_bytes()))
        return is_gone()


@contextmanager
def _watched(process: int) -> Iterator[Callable[[], bool]]:
    """A function that says whether ``process`` has ended, whether or not somebody has waited for it."""

    def is_unknown() -> bool:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        return False

    try:
        descriptor = os.pidfd_open(process)
    except (AttributeError, OSError):  # it is gone, or the system has none of these
        yield is_unknown
        return
    ended = select.poll()  # select() takes no descriptor above 1023, and a script may have many files open
    ended.register(descriptor, select.POLLIN)
    try:
        yield lambda: bool(ended.poll(0))
    finally:
        os.close(descriptor)
