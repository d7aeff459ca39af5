"""``hardpoint ...`` in processes that begin with torch imported: they are forked as an engine's processes are."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TextIO

from hardpoint import fork_server
from hardpoint.engine.processes import child_process
from hardpoint.thread_waiting import brief_waits


class ForkedProgram:
    """The command line in a process of its own; what ``subprocess.Popen`` has of the same names."""

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
