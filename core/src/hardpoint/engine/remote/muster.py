"""Starts of replicas that share experts: one that failed starts again when all have failed, and all start alike."""

from __future__ import annotations

import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import mkdtemp

from hardpoint.config import EngineConfig
from hardpoint.engine.remote.remote_core import Link
from hardpoint_plugin_api import EngineError

_GRACE_SECONDS = 10.0
"""For the other replicas to fail by themselves, with a reason; then they are ended. One may wait for ranks that are
gone, while it loads."""


class Muster:
    """Starts a core for each replica, by ``start_link``. May be called from the threads that step the replicas."""

    def __init__(self, start_link: Callable[[EngineConfig], Link], replicas: int) -> None:
        self._start_link, self._replicas = start_link, replicas
        self._folder = Path(mkdtemp(prefix="hardpoint-replicas-"))
        self.clean_up = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        """Removes the folders, once all cores have ended."""
        self._links: dict[int, Link] = {}
        self._failed: dict[int, EngineConfig] = {}
        self._number, self._configs = 0, dict[int, EngineConfig]()
        self._is_closed = False
        self._changed = threading.Condition()

    def start(self, config: EngineConfig) -> Link:
        """Start a core by ``config``, with a folder where it meets the others. One that failed waits for the others.

        Kernels that any of them has denied are denied to all. Raises EngineError where the engine is closed meanwhile.
        """
        replica = config.topology.replica
        if replica in self._links:
            config = self._with_all(config)
        folder = self._folder / str(self._number)
        folder.mkdir(exist_ok=True)
        link = self._links[replica] = self._start_link(config.meeting_in(str(folder)))
        return link

    def end(self) -> None:
        """Start no core any more, for those that wait either."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _with_all(self, config: EngineConfig) -> EngineConfig:
        """Wait until all replicas have failed; returns ``config`` with what the others have learnt."""
        replica, number = config.topology.replica, self._number
        until = time.monotonic() + _GRACE_SECONDS
        with self._changed:
            self._failed[replica] = config
            if len(self._failed) == self._replicas:
                self._configs, self._failed = self._failed, {}
                self._number += 1
                self._changed.notify_all()
            while self._number == number and not self._is_closed:
                self._changed.wait(max(0.0, until - time.monotonic()) if until else None)
                late = [link for other, link in self._links.items() if other not in self._failed]
                if until and time.monotonic() >= until and self._number == number:
                    until = 0.0
                    threading.Thread(target=_end, args=(late,), name="hardpoint-muster", daemon=True).start()
            if self._is_closed:
                raise EngineError("the engine is closed")
            for other in self._configs.values():
                config = config.learning(other.deny, blame_ops=other.blame_ops)
            return config


def _end(links: Iterable[Link]) -> None:
    for link in links:
        if link.lost is None:
            link.close(0)
