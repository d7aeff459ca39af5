"""Servers in processes of their own, with the demo model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engines import until
from tests.support.forked import ForkedProgram
from tests.support.processes import api_processes, engine_processes

SMALL = ("--platform", "cpu", "--cpu.threads", "1", "--kv-cache-memory", "48MiB", "--max-num-seqs", "16")
# Without ``verify=False`` each request reads the system's certificates, which takes 30 ms of processor time.
send: Callable[..., httpx.Response] = partial(httpx.request, timeout=60, verify=False)
open_stream = partial(httpx.stream, timeout=120, verify=False)
_LISTENING = re.compile(r"listening on (https?://\S+|unix:\S+)")


@dataclass
class RunningServer:
    """``url`` is where it listens; ``log`` what it has said so far."""

    process: subprocess.Popen[str] | ForkedProgram
    url: str
    log: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """Of the client that asks it: certificates, another way to connect, headers."""
    others: frozenset[int] = frozenset()
    """The processes of engines and servers below this one that were there before the server."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def num_descriptors(self) -> int:
        """How many files, pipes and sockets its process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def sockets(self) -> set[str]:
        """Its process's open sockets, each by a name that no later socket has."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        names = set()
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # closed since the folder was listed
                names.add(os.readlink(path))
        return {name for name in names if name.startswith("socket:")}

    @property
    def engine_pids(self) -> list[int]:
        """Its engine's processes, in the order of their start."""
        return self._below(engine_processes)

    @property
    def api_pids(self) -> list[int]:
        """Its processes that answer HTTP where it has several, in the order of their start."""
        return self._below(api_processes)

    def _below(self, of_a_kind: Callable[[int], list[int]]) -> list[int]:
        """A forked server's children are forked from the same process as itself: all that are new below this one."""
        above = os.getpid() if isinstance(self.process, ForkedProgram) else self.process.pid
        return [pid for pid in of_a_kind(above) if pid not in self.others]

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        """Send JSON."""
        return self.ask("POST", path, json=body, **options)

    def get(self, path: str) -> httpx.Response:
        """Ask for ``path``."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request on a connection of its own."""
        with httpx.Client(**{"timeout": 60, "verify": False, **self.options}) as client:
            base = self.url if self.url.startswith("http") else "http://localhost"
            return client.request(method, base + path, **options)

    def sample(self, name: str, **labels: str) -> float:
        """The sum of the samples of ``/metrics`` with that name and at least those labels."""
        return self.samples(name, **labels)[0]

    def samples(self, *names: str, **labels: str) -> list[float]:
        """The same for several names, read at once."""
        families = list(text_string_to_metric_families(self.get("/metrics").text))
        found = [sample for family in families for sample in family.samples if labels.items() <= sample.labels.items()]
        return [sum(sample.value for sample in found if sample.name == name) for name in names]

    def is_idle(self) -> bool:
        """True where no request runs or waits, and no page is held."""
        free, pages, running, waiting = self.samples(
            "hardpoint_free_cache_pages",
            "hardpoint_cache_pages",
            "hardpoint_running_requests",
            "hardpoint_waiting_requests",
        )
        return running == waiting == 0 and free == pages > 0

    def wait_until_idle(self) -> None:
        """Wait until every request has ended."""
        until(self.is_idle)

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(sig)
        code = self.process.wait(60)
        assert code is not None, "it does not end"
        return code


@contextmanager
def running_server(*flags: str, wait: bool = True, program: bool = False, **options: Any) -> Iterator[RunningServer]:
    """A server with the demo model and ``flags``; ready, unless told not to wait. ``options`` are its clients'.

    Forked with torch imported, unless a ``program`` of its own is asked for, which takes seven seconds of a processor
    more to start and below which its engine's processes are.
    """
    others = frozenset(engine_processes(os.getpid()) + api_processes(os.getpid()))
    command = ["serve", "--port", "0", *SMALL, *flags]
    process: subprocess.Popen[str] | ForkedProgram
    if program or os.environ.get("OMP_NUM_THREADS") != "1":
        process = subprocess.Popen(
            [sys.executable, "-m", "hardpoint.cli", *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    else:
        process = ForkedProgram(*command)
    server = RunningServer(process, "", options=options, others=others)
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line)
            if found := _LISTENING.search(line):
                server.url = found[1]
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert listening.wait(60)
        assert server.url, f"it does not listen:\n{''.join(server.log)}"
        if wait:
            until(lambda: server.get("/ready").status_code == 200, 120)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
