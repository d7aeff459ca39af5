"""Processes for trials, as the kit sees them. ``nursery.py`` is the other end, ``worker.py`` what runs there."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from threading import Lock
from typing import Any

from hardpoint import fork_server

_TAIL = 12
"""Lines of what a process wrote that a report shows once it died."""
_FATAL = ("Fatal Python error", "Timeout (")
_LEAVE_SECONDS = 5.0
"""How long a process that has nothing more to do may take to end by itself."""
_END_SECONDS = 30.0
_LENGTH = 8
_NURSERY = "hardpoint.conformance.nursery"
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For OpenMP's threads, unless the environment says otherwise. Several processes try kernels at once, with as many
threads each as an engine has. Threads that spin while they wait for work take cores from those that have some: on two
cores, beside one busy neighbour, the trials of 44 linear kernels took 70 s with spinning threads and 7 s with these."""


class DeathError(Exception):
    """A process died or was killed; the message says how."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Nursery:
    """Starts processes for trials; several threads may ask. Its own process is started when the first is wanted."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._orders: socket.socket | None = None
        self._process: BaseProcess | None = None

    def start(self, order: Mapping[str, Any]) -> TrialProcess:
        """A process that serves ``order``, see ``worker.serve``. Raises DeathError where none can be had."""
        questions, ask = os.pipe()
        answers, answer = os.pipe()
        mine, guardians = socket.socketpair()
        printed = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # as long as the process
        data = json.dumps(order).encode()
        with self._lock:
            try:
                orders = self._orders or self._open()
                given = [questions, answer, printed.fileno(), guardians.fileno()]
                socket.send_fds(orders, [len(data).to_bytes(_LENGTH, "big")], given)
                orders.sendall(data)
            except OSError as error:
                raise DeathError("crash", f"the process that starts others is gone: {error.strerror}") from error
            finally:
                os.close(questions)
                os.close(answer)
                guardians.close()
        return TrialProcess(ask, answers, mine, printed)

    def _open(self) -> socket.socket:
        self._orders, theirs = socket.socketpair()
        with theirs, fork_server.signals_held():
            self._process = fork_server.start(
                _nurse, (theirs,), "hardpoint-conform", [_NURSERY], _PATIENT, imports_main=False
            )
        return self._orders

    def close(self) -> None:
        """End the process; those that it started live on until they are closed."""
        if self._orders and self._process:
            self._orders.close()
            self._process.join()
            self._process.close()
            self._orders = self._process = None


def _nurse(orders: socket.socket) -> None:
    """The main function of the process that starts the trials' processes."""
    os.setsid()  # an interrupt from the keyboard is for the kit alone, which ends the rest
    signal.pthread_sigmask(signal.SIG_UNBLOCK, fork_server.GROUP_SIGNALS)
    for name, value in _PATIENT.items():  # of a process that was spawned
        os.environ.setdefault(name, value)
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for stream in (0, 1):
            os.dup2(nothing.fileno(), stream)
    import_module(_NURSERY).main(orders.detach())


class TrialProcess:
    """The other end of ``worker.serve``. ``ask`` and ``answers`` are pipes, ``guardian`` the guardian's socket."""

    def __init__(self, ask: int, answers: int, guardian: socket.socket, printed: Any) -> None:
        self._ask, self._answers, self._guardian, self._printed = ask, answers, guardian, printed
        self._selector = selectors.DefaultSelector()
        self._selector.register(answers, selectors.EVENT_READ)
        self._buffer, self._is_closed = b"", False

    def ask(self, case: str, seconds: float) -> Iterator[Mapping[str, Any]]:
        """Have one case run; yields the answers: its results as plain data, then ``done``. Raises DeathError."""
        with suppress(BrokenPipeError):  # it died since; reading says how
            os.write(self._ask, (json.dumps({"case": case, "seconds": seconds}) + "\n").encode())
        deadline = time.monotonic() + seconds
        while True:
            answer = self.read(deadline - time.monotonic())
            yield answer
            if "done" in answer:
                return

    def read(self, seconds: float) -> dict[str, Any]:
        """The next answer. Raises DeathError where none comes in time, or none will come."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.kill()
                self._status(_END_SECONDS)
                raise DeathError("hang", f"no result within the time limit; it was here:\n{self._tail()}")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise DeathError("crash", f"the process ended ({self._status(_END_SECONDS)}):\n{self._tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process and everything that it started, from any thread; a ``read`` under way raises then."""
        with suppress(OSError):
            self._guardian.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let the process end, or end it, with everything that it started."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._ask)
        if self._status(_LEAVE_SECONDS) is None:
            self.kill()
            self._status(_END_SECONDS)
        self._guardian.close()
        os.close(self._answers)
        self._selector.close()
        self._printed.close()

    def _status(self, seconds: float) -> str | None:
        """How the process ended, once it has; None if it has not within ``seconds``."""
        self._guardian.settimeout(seconds)
        try:
            text = self._guardian.recv(16)
        except OSError:  # a timeout is one
            return None
        if not text:
            return "nobody saw how"
        code = int(text)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _tail(self) -> str:
        self._printed.seek(0)
        lines = [line for line in self._printed.read().splitlines() if line.strip()]
        # The text of faulthandler begins with the frame that matters and ends with a list of every loaded module.
        fatal = next((i for i, line in enumerate(lines) if line.startswith(_FATAL)), None)
        shown = lines[-_TAIL:] if fatal is None else lines[max(0, fatal - _TAIL // 4) :][:_TAIL]
        return "\n".join(shown)
