"""The process that the trials' processes are forked from: it has imported torch and the kit, and opened no device.

Importing takes seconds, and each contribution is tried in a process of its own; so it is done once. Between this
process and each trial's stands a guardian, which tells how the trial ended, and ends it, and all that it started,
when whoever wanted it is gone, however that came about. On Linux that includes what was started in a session of its
own: the guardian is handed every process below it whose parent has ended. ``processes.py`` is the other end.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

# Checks would otherwise import these in each process again. The last is read by metadata of distributions.
import covertable  # type: ignore[import-untyped]  # noqa: F401  # it ships no types
import importlib_metadata._adapters  # noqa: F401

from hardpoint.conformance import families, worker
from hardpoint.plugin_host import discover

for module in iter_modules(families.__path__):
    import_module(f"{families.__name__}.{module.name}")

LENGTH = 8
"""Bytes that say how long an order is."""
NUM_DESCRIPTORS = 4
"""Questions to read, answers to write, a file for what the process prints, and the guardian's socket."""
_POLL_SECONDS = 0.05
_FINISHED, _FAILED = 0, 1
_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


def main(orders_from: int) -> None:
    """Fork a process for each order that comes by the socket ``orders_from``, until its other end is closed."""
    orders = socket.socket(fileno=orders_from)
    discover(quiet=True)  # imports no plugin; what it reads of the environment is cached for all processes
    gc.collect()
    gc.freeze()  # no garbage collection of theirs writes to these objects, whose memory all of them share
    while True:
        head, descriptors, _, _ = socket.recv_fds(orders, LENGTH, NUM_DESCRIPTORS)
        if not head:
            return
        order = _exactly(orders, int.from_bytes(head, "big"))
        if os.fork() == 0:
            orders.close()
            _leave_after(partial(_guard, order, descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += source.recv(count - len(data))
    return data


def _guard(order: bytes, descriptors: list[int]) -> None:
    """Fork the trials' process, and report its status as text once it has ended."""
    questions, answers, printed, asked_by = descriptors
    _adopt_orphans()
    trials = os.fork()
    if trials == 0:
        os.close(asked_by)
        _leave_after(partial(_try, order, questions, answers, printed))
    for descriptor in (questions, answers, printed):
        os.close(descriptor)
    with suppress(OSError):
        os.setpgid(trials, trials)  # here and there: whichever comes first
    while True:
        ended, status = os.waitpid(trials, os.WNOHANG)
        if ended:
            break
        if select.select([asked_by], [], [], _POLL_SECONDS)[0]:  # nothing is ever sent: its other end is closed
            _end_group(trials)
            _, status = os.waitpid(trials, 0)
            break
    _end_group(trials)
    _end_children()
    with suppress(OSError):
        os.write(asked_by, str(os.waitstatus_to_exitcode(status)).encode())


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, where the system can do that."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_children() -> None:
    """End this process's children, and theirs, which become its own by that, until none is left."""
    with suppress(ChildProcessError):  # none is left
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """The children of this process that it has not waited for; none where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            _, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def _try(order: bytes, questions: int, answers: int, printed: int) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)  # so that what a kernel starts can be ended with it
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    for descriptor in (questions, answers):
        os.set_inheritable(descriptor, False)
    worker.main({**json.loads(order), "questions": questions, "answers": answers})


def _leave_after(do: Callable[[], None]) -> None:
    """Do it in a forked process, and end that without returning to what it was forked from."""
    code = _FAILED
    try:
        do()
        code = _FINISHED
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else _FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
