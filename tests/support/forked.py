"""Programs in processes that begin with torch imported: they are forked as an engine's processes are."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from typing import TextIO

from hardpoint import fork_server
from hardpoint.engine.processes import child_process
from hardpoint.thread_waiting import brief_waits


class ForkedProgram:
    """``hardpoint ...`` in a process of its own; what ``subprocess.Popen`` has of the same names."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = Pipe(duplex=False)
        self._process = fork_server.start(
            _main, (theirs, arguments), "hardpoint", child_process.MODULES, brief_waits(), imports_main=False
        )
        theirs.close()
        self.stderr: TextIO = os.fdopen(os.dup(ours.fileno()), encoding="utf-8", errors="replace")
        ours.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """The same, after at most ``timeout`` seconds."""
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, sig: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it."""
        self._process.kill()


def _main(stderr: Connection, arguments: tuple[str, ...]) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["hardpoint", *arguments]
    from hardpoint.cli.main import main

    main()


def run_module(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    seconds: float,
    variables: Mapping[str, str] | None = None,
    modules: Sequence[str] = child_process.MODULES,
) -> CompletedProcess[str]:
    """Run ``python -m module`` in ``folder``, with one thread; its output has what it writes to stderr, too.

    The folders of a PYTHONPATH among ``variables`` come first in its path. It is killed after ``seconds``. It begins
    with ``modules`` imported; processes that it starts with the same ones are forked from its own server.
    """
    given = (module, [module, *arguments], str(folder), {"OMP_NUM_THREADS": "1", **(variables or {})})
    brief = brief_waits()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        with Connection(os.dup(printed.fileno())) as output:
            process = fork_server.start(_run_module, (output, *given), module, modules, brief, imports_main=False)
        process.join(seconds)
        process.kill()
        process.join()
        printed.seek(0)
        assert process.exitcode is not None
        return CompletedProcess(given[1], process.exitcode, printed.read(), "")


def _run_module(
    output: Connection, module: str, arguments: list[str], folder: str, variables: Mapping[str, str]
) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.chdir(folder)
    os.environ.update(variables)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    sys.path[:0] = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), folder]
    sys.argv = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
