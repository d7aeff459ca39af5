"""The signals that end a server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Calls ``stop`` with ``deadline`` seconds at the first SIGINT, SIGTERM or SIGHUP, and with 0 at each later one."""

    def __init__(self, deadline: float, stop: Callable[[float], None]) -> None:
        self._deadline, self._stop = deadline, stop
        self._has_come = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle them in the running event loop.

        A SIGHUP that is ignored, as nohup has it, stays so. A SIGINT does not: shells have it ignored by what they
        start in the background.
        """
        loop = asyncio.get_running_loop()
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [each for each in _SIGNALS if not (nohup and each is signal.SIGHUP)]
        for each in handled:
            loop.add_signal_handler(each, self._take, each)
        try:
            yield
        finally:
            for each in handled:
                loop.remove_signal_handler(each)

    def _take(self, sig: signal.Signals) -> None:
        deadline = 0.0 if self._has_come else self._deadline
        ending = "ending at once" if self._has_come else f"open requests have {deadline:g} seconds to end"
        logger.info("%s: %s", sig.name, ending)
        self._has_come = True
        self._stop(deadline)
