"""Processes that are measured: what they have used so far, and a server in one of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from hardpoint import fork_server
from hardpoint.config import EngineConfig
from hardpoint.engine.processes.child import API_NAME
from hardpoint_plugin_api import ConfigError, HardpointError

_STOP_SECONDS = 30


@dataclass(frozen=True)
class ProcessSample:
    """Use of resources by one process: processor seconds of all threads, resident bytes, descriptors and threads."""

    name: str
    cpu_seconds: float
    resident_bytes: int
    num_descriptors: int
    num_threads: int


def sample_processes(pid: int) -> dict[int, ProcessSample]:
    """The server ``pid`` and every process below it, by pid, as Linux tells (proc(5)).

    The first is called "server". So are those that answer HTTP for it, with a number; the others are called "engine",
    "engine 2" and so on. Processes that end meanwhile are left out. Raises ConfigError where there is no process
    ``pid`` or no /proc.
    """
    try:
        found = {pid: _sample(pid, "server")}
    except OSError as error:
        raise ConfigError(f"process {pid} cannot be measured: {error}; /proc must be there, and the process") from None
    kinds: Counter[str] = Counter()
    for child in _processes_below(pid):
        with suppress(OSError):
            name = Path(f"/proc/{child}/comm").read_text(encoding="utf-8")
            kind = "server" if name.startswith(API_NAME) else "engine"
            sample = _sample(child, kind)
            kinds[kind] += 1
            is_only_engine = kind == "engine" and kinds[kind] == 1
            found[child] = sample if is_only_engine else replace(sample, name=f"{kind} {kinds[kind]}")
    return found


def _sample(pid: int, name: str) -> ProcessSample:
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # utime and stime, fields 14 and 15 of the whole line
    resident = int((folder / "statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    descriptors = len(os.listdir(folder / "fd"))
    return ProcessSample(name, ticks / os.sysconf("SC_CLK_TCK"), resident, descriptors, int(fields[17]))


def _processes_below(pid: int) -> Iterator[int]:
    for child in _children(pid):
        with suppress(OSError):
            folder = Path(f"/proc/{child}")
            is_server = (folder / "comm").read_text(encoding="utf-8").strip() == fork_server.NAME
            if not is_server and b"resource_tracker" not in (folder / "cmdline").read_bytes():  # multiprocessing's own
                yield child
        yield from _processes_below(child)


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                yield from map(int, (thread / "children").read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class OwnServer:
    """A server that was started to be measured."""

    url: str
    pid: int
    _said: Connection | None = None

    def why_ended(self) -> str:
        """The output of a server that ended by itself."""
        try:
            return str(self._said.recv()) if self._said and self._said.poll(_STOP_SECONDS) else "it does not say why"
        except EOFError:
            return "it does not say why"


@contextmanager
def own_server(config: EngineConfig, num_processes: int = 1, token_rate: float | None = None) -> Iterator[OwnServer]:
    """A server with ``config`` in a process of its own, on a free port of this host; it may be loading still.
    ``num_processes`` answer HTTP. With ``token_rate`` a stand-in for the engine gives as many tokens a second.

    It ends with the context, and with this process, whatever ends that. Raises HardpointError where it does not even
    listen.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(config, num_processes, token_rate, theirs, os.getpid()), name="hardpoint server"
    )
    process.start()
    theirs.close()
    try:
        try:
            said = ours.recv()
        except EOFError:
            said = "it does not say why"
        if not isinstance(said, int):
            raise HardpointError(f"the server has ended before it listened: {said}")
        assert process.pid is not None
        yield OwnServer(f"http://127.0.0.1:{said}", process.pid, ours)
    finally:
        process.terminate()
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        ours.close()


def _serve(
    config: EngineConfig, num_processes: int, token_rate: float | None, connection: Connection, parent: int
) -> None:
    from hardpoint.bench.token_source import start_token_source
    from hardpoint.engine.frontend.frontend import start_core
    from hardpoint.engine.processes.child_process import listen
    from hardpoint.server.listening import listening
    from hardpoint.server.run import serve_at
    from hardpoint.server.settings import ServerSettings

    def end_with_parent() -> None:
        listen(connection, parent, lambda message: None)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="parent's end", daemon=True).start()
    try:
        settings = ServerSettings(port=0, shutdown_deadline=0, api_server_count=num_processes)
        with listening(settings) as listener:
            connection.send(listener.getsockname()[1])
            start = start_core if token_rate is None else partial(start_token_source, rate=token_rate)
            serve_at(listener, config, settings, start)
    except HardpointError as error:
        connection.send(str(error))
