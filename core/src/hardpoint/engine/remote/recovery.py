"""Conclusions from an engine's failures: whether it is built again, and of which kernels."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.config import EngineConfig
from hardpoint.plugin_host.culprits import Culprit, Suspect, find_culprit
from hardpoint_plugin_api import ConfigError, HardpointError, PluginError, SelectionError

logger = logging.getLogger(__name__)

FINAL = (ConfigError, PluginError, SelectionError)
"""Errors that building an engine raises the second time, too."""


@dataclass(frozen=True)
class RecoveryState:
    """The state that operators see. ``restarting`` says why the engine is being built again at this moment."""

    num_restarts: int = 0
    restarting: str | None = None
    last_cause: str | None = None
    denied: tuple[Culprit, ...] = ()
    blames_ops: bool = False


class Recovery:
    """Decides after each failure. ``config`` is what the next engine is built from. For one thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._recent: deque[float] = deque()  # when it was built again, within the window
        self.num_restarts = 0
        self.last_cause: str | None = None
        self.denied: tuple[Culprit, ...] = ()

    def may_restart(self) -> bool:
        """Whether an engine that fails now is built again."""
        return self.config.restarts_engine and self._num_recent() < self.config.max_engine_restarts

    def _num_recent(self) -> int:
        since = time.monotonic() - self.config.engine_restart_window
        return sum(when > since for when in tuple(self._recent))

    def adopt(self, denied: Sequence[Culprit]) -> None:
        """Take over what a start has put on the deny list, for the next."""
        for culprit in denied:
            if culprit.choice not in self.config.deny:
                self.denied += (culprit,)
                self.config = self.config.denying(culprit.choice)

    def note_adapters_loaded(self) -> None:
        """The next engine's start loads no adapters: it is given them one by one, and goes on without one that is
        gone."""
        self.config = self.config.loading_no_adapters()

    def verdict(self, cause: str) -> str:
        """The error for everybody who waited for an engine that is not built again."""
        if not self.config.restarts_engine or not self._recent:
            return cause
        return (
            f"the engine was built again {self._num_recent()} times within {self.config.engine_restart_window} seconds "
            f"(--max-engine-restarts {self.config.max_engine_restarts}) and is given up; its last failure: {cause}"
        )

    def learn(self, cause: str, stack: str, suspects: Sequence[Suspect]) -> bool:
        """Count a restart; returns whether a kernel is to blame. ``stack`` is what the failure left, empty where the
        engine was ended from outside: then nothing is wrong with any kernel. A kernel that it names is denied; where it
        names none, the next one will."""
        self._recent.append(time.monotonic())
        while len(self._recent) > self.config.max_engine_restarts:
            self._recent.popleft()
        self.num_restarts, self.last_cause = self.num_restarts + 1, cause
        if not stack:
            return False
        culprit = find_culprit(stack, suspects, named_alone=_is_late(cause))
        if culprit is not None and culprit.choice not in self.config.deny:
            self.denied += (culprit,)
            self.config = self.config.denying(culprit.choice)
            logger.error(
                "the engine failed in %s: it is not used any more; to keep it so, start with --deny %s, and report it "
                "to its author",
                culprit,
                ",".join(self.config.deny),
            )
        elif culprit is None and not self.config.blame_ops:
            self.config = self.config.blaming_ops()
            logger.warning(
                "no plugin's kernel can be named: the new engine runs as with --blame-ops --enforce-eager, slower, so "
                "that the next failure names one; it stays so until the program is started again"
            )
        return culprit is not None


def is_final(error: Exception) -> bool:
    """True for what building an engine raises however often it is tried."""
    return isinstance(error, HardpointError) and isinstance(error, FINAL)


def _is_late(cause: str) -> bool:
    """True for failures of a device, which says so at some later call: torch has one class for them."""
    return cause.startswith("AcceleratorError")
