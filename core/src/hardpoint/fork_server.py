"""Processes that begin with their modules imported: they are forked from a server that has imported them once.

Importing torch takes seconds of a processor, and an engine has a process for its core and one for each rank, and new
ones after a crash. A fork of the program itself would copy threads' locks and device contexts in a state that nobody
can use. So the fork is made from a *fork server*: a process that a program starts with its first such child, which has
imported modules, has opened no device, and runs no code but the standard library's (``multiprocessing.forkserver``).

A child finds what a spawned one finds: the environment, working folder, standard output and error of its parent at
that moment, and its ``__main__`` module. Its own children are forked from the same server. A process is spawned in
place of that where fork is no option: outside of Linux, and where the program has changed its environment or
processor affinity since its servers started, since libraries read these while they are loaded.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import connection, context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

logger = logging.getLogger(__name__)

LATE_VARIABLES = {"COLUMNS", "LINES", "PYTEST_CURRENT_TEST", "PYTHONPATH"}
"""Variables that no library reads while it is loaded: a child gets their values from its parent, whatever its server
was started with. Instead of PYTHONPATH, a child has the ``sys.path`` of its parent."""

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that reach every process of a group: a parent ends its children in order."""

NAME = "hardpoint-forks"
"""A server's name in lists of processes."""

_MOST_SERVERS = 3
"""Of one program. One that changes its environment again and again has its further processes spawned."""
_STREAMS = (1, 2)


@dataclass(frozen=True)
class _Key:
    """Processes of equal keys can be forked from one server."""

    modules: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    affinity: frozenset[int]

    @classmethod
    def of(cls, modules: Sequence[str], environment: Mapping[str, str]) -> _Key:
        """The key of a process that this one would start now."""
        variables = sorted((name, value) for name, value in environment.items() if name not in LATE_VARIABLES)
        return cls(tuple(modules), tuple(variables), frozenset(os.sched_getaffinity(0)))


class _Server(forkserver.ForkServer):
    """A fork server besides that of ``multiprocessing`` itself, which belongs to the program."""

    _forkserver_address: Any
    _forkserver_alive_fd: Any
    _forkserver_pid: int | None
    _stop: Callable[[], None]

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__()
        self.modules = tuple(modules)
        self.children: WeakSet[BaseProcess] = WeakSet()
        self.set_forkserver_preload(list(modules))

    @property
    def address(self) -> Any:
        """The address of the server's socket, once it runs."""
        return self._forkserver_address

    @property
    def is_idle(self) -> bool:
        """Whether every child that this process has had from it has ended."""
        sentinels = []
        for child in self.children:
            with suppress(ValueError):  # it was closed
                sentinels.append(child.sentinel)
        return len(connection.wait(sentinels, 0)) == len(sentinels)

    def stop(self) -> None:
        """End the server, which is idle."""
        if self._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._forkserver_pid, signal.SIGKILL)
        self._stop()


class _ParentsServer(_Server):
    """The server that this process was forked from. It lives as long as any process holds ``alive`` open."""

    def __init__(self, modules: Sequence[str], address: Any, alive: int) -> None:
        super().__init__(modules)
        self._forkserver_address, self._forkserver_alive_fd = address, alive

    def ensure_running(self) -> None:
        """See ForkServer."""


_lock = threading.Lock()
_servers: dict[_Key, _Server] = {}
"""The least recently used comes first."""


def start(
    target: Callable[..., object],
    args: tuple[object, ...],
    name: str,
    modules: Sequence[str],
    defaults: Mapping[str, str] | None = None,
    *,
    imports_main: bool = True,
) -> BaseProcess:
    """Start a process that runs ``target(*args)``, forked from a server that has imported ``modules``.

    Its environment has the variables ``defaults``, too, where this process does not set them; a spawned process lacks
    them. It imports the program's ``__main__``, which may define what ``args`` are made of, unless told not to. Raises
    RuntimeError, as ``multiprocessing`` does, in a process that still imports its ``__main__``.
    """
    environment = {**(defaults or {}), **os.environ}
    try:
        if server := _running_server(modules, environment):
            forked = _Forked(server, environment, target, args, name, imports_main)
            forked.start()
            server.children.add(forked)
            return forked
    except (OSError, EOFError) as error:  # the server is gone, or cannot be started
        logger.warning("cannot fork the process %s, which is spawned in place of that: %s", name, error)
    spawned = multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)
    spawned.start()
    return spawned


def show_name(name: str) -> None:
    """Have lists of processes, such as ``ps`` and ``top``, show the first 15 characters of ``name`` for this one."""
    with suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def _running_server(modules: Sequence[str], environment: Mapping[str, str]) -> _Server | None:
    """The server for such processes; None where they have to be spawned. Raises OSError where none can be started."""
    if sys.platform != "linux":
        return None
    key = _Key.of(modules, environment)
    with _lock:
        server = _servers.pop(key, None)
        if server is None:
            if len(_servers) == _MOST_SERVERS:
                idle = next((each for each, other in _servers.items() if other.is_idle), None)
                if idle is None:
                    return None
                _servers.pop(idle).stop()
            server = _Server(modules)
        with _environment(environment), signals_held():
            server.ensure_running()
        _servers[key] = server
    return server


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold back the signals that a terminal or a service manager sends to every process of a group.

    Processes that are started meanwhile inherit this. A server holds them back for good: it ends after its children.
    """
    resource_tracker.ensure_running()  # started with a process, it would lift the hold
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with ``variables``, which a server that is started now inherits."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class _Inherited:
    """The state that a child has from its parent, not from its server. Made in the parent, unpickled in the child."""

    def __init__(self, server: _Server, environment: Mapping[str, str]) -> None:
        self.environment, self.address = dict(environment), server.address
        self.held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.streams: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"streams": [reduction.DupFd(stream) for stream in _STREAMS]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"streams": [stream.detach() for stream in state["streams"]]})

    def adopt(self) -> None:
        """Have this process, the child, be as it would be had its parent spawned it."""
        for ours, theirs in zip(_STREAMS, self.streams, strict=True):
            os.dup2(theirs, ours)
            os.close(theirs)
        os.environ.clear()
        os.environ.update(self.environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.held)


def _begin(inherited: _Inherited, modules: Sequence[str], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """The target of a forked child."""
    inherited.adopt()
    ours: Any = forkserver._forkserver  # which ``multiprocessing`` has given the end of the pipe that keeps it alive
    key = _Key.of(modules, os.environ)
    _servers[key] = _ParentsServer(modules, inherited.address, ours._forkserver_alive_fd)
    try:
        target(*args)
    finally:
        atexit._run_exitfuncs()  # ``multiprocessing`` leaves them out where a process was forked, before Python 3.14


class _Forked(BaseProcess):
    """A process like those that are spawned, and whose own default is to spawn; it is forked from ``server``."""

    _start_method = "spawn"

    def __init__(
        self,
        server: _Server,
        environment: Mapping[str, str],
        target: Callable[..., object],
        args: tuple[object, ...],
        name: str,
        imports_main: bool,
    ) -> None:
        given = (_Inherited(server, environment), server.modules, target, args)
        super().__init__(target=_begin, args=given, name=name)
        self._server: _Server | None = server
        self.imports_main = imports_main

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_server": None}

    @staticmethod
    def _Popen(process: BaseProcess) -> _Popen:  # noqa: N802  # multiprocessing's name
        return _Popen(process)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Popen(popen_forkserver.Popen):
    """``popen_forkserver.Popen`` with a server that is not the module's own."""

    _fds: list[int]

    def _launch(self, process: Any) -> None:
        data = BytesIO()
        context.set_spawning_popen(self)
        try:
            preparation = spawn.get_preparation_data(process.name)
            if not process.imports_main:
                preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
            reduction.dump(preparation, data)
            reduction.dump(process, data)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, to_child = process._server.connect_to_new_process(self._fds)
        # The child sees by the other one of these that its parent has gone.
        self.finalizer = util.Finalize(self, _close, (os.dup(to_child), self.sentinel))
        with open(to_child, "wb") as file:
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)
