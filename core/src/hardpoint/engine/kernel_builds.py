"""Builds of kernels beside a running engine: one child process at a time, and a word when all have ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from hardpoint.plugin_host import Offer
from hardpoint_plugin_api import KernelBuild

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 30.0
_NICE = 10
_LAST_LINES = 15


class KernelBuilds:
    """Runs ``pending`` builds in order, in a thread; ``close`` ends what still runs.

    A build that fails is one warning; the kernel that serves goes on serving.
    """

    def __init__(self, pending: Iterable[tuple[Offer, KernelBuild]]) -> None:
        self._pending: dict[KernelBuild, Offer] = {}
        for offer, build in pending:
            self._pending.setdefault(build, offer)
        self._lock = threading.Lock()
        self._notify: Callable[[], None] = _nothing
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = self._is_ready = False
        self._thread = threading.Thread(target=self._run, name="hardpoint-kernel-builds", daemon=True)
        if self._pending:
            self._thread.start()

    def when_ready(self, notify: Callable[[], None]) -> None:
        """Call ``notify``, from another thread, when kernels can be switched."""
        with self._lock:
            self._notify = notify
            is_ready = self._is_ready
        if is_ready:
            notify()

    def take_ready(self) -> bool:
        """Whether all builds have ended, at least one of them well: True once."""
        if not self._is_ready:
            return False
        with self._lock:
            self._is_ready = False
        return True

    def close(self) -> None:
        """End the build that runs, with all that it started, and start no other."""
        with self._lock:
            self._is_closed, child = True, self._child
        if child is not None:
            _end(child)
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _has_closed(self) -> bool:
        with self._lock:
            return self._is_closed

    def _run(self) -> None:
        built = [build for build, offer in self._pending.items() if self._build(build, offer)]
        with self._lock:
            self._is_ready = bool(built) and not self._is_closed
            notify = self._notify if self._is_ready else _nothing
        notify()

    def _build(self, build: KernelBuild, offer: Offer) -> bool:
        who = f"{offer.contribution} of plugin {offer.plugin}"
        began = time.monotonic()
        with tempfile.TemporaryFile() as said:
            with self._lock:
                if self._is_closed:
                    return False
                logger.info("building %s for %s; another kernel serves meanwhile", build.title, who)
                try:
                    self._child = child = _start(build, said.fileno())
                except OSError as error:
                    logger.warning("%s for %s cannot be built: %s", build.title, who, error)
                    return False
            while True:
                try:
                    status = child.wait(_PROGRESS_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    logger.info("still building %s, for %.0f s", build.title, time.monotonic() - began)
            _end(child)  # what it started and left behind
            self._child = None
            if self._has_closed():
                return False
            if status == 0:
                logger.info("%s was built in %.1f s", build.title, time.monotonic() - began)
                return True
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        logger.warning(
            "%s for %s could not be built: the build %s; another kernel goes on serving. Its last lines:\n%s",
            build.title,
            who,
            how,
            "\n".join(lines),
        )
        return False


def _start(build: KernelBuild, output: int) -> subprocess.Popen[bytes]:
    """The build in a process group of its own, at low priority, with half of the cores."""
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    environment = {"MAX_JOBS": str(cores), **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "import os, pkgutil, sys; os.nice(int(sys.argv[1])); pkgutil.resolve_name(sys.argv[2])(*sys.argv[3:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(_NICE), build.target, *build.arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a build's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _nothing() -> None:
    """Nobody wants to know."""
