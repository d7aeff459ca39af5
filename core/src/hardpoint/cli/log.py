"""The log, as the commands show it."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading

_HELD = 10_000
"""Log lines that wait for a slow reader; beyond that they are dropped, and counted."""
_FLUSH_SECONDS = 1.0
"""How long the end of the process waits for lines to be read."""


def show_log(level: int = logging.INFO, *, waits: bool = True) -> None:
    """Send Hardpoint's log to stderr, one plain line each.

    Without ``waits``, a reader of stderr that stops reading stops nothing else: lines are written by a thread.
    """
    handler = logging.StreamHandler() if waits else _Queued(sys.stderr.fileno())
    handler.setFormatter(logging.Formatter("hardpoint: %(message)s"))
    logger = logging.getLogger("hardpoint")
    logger.handlers = [handler]
    logger.setLevel(level)


class _Queued(logging.Handler):
    """Writes lines to a file descriptor, in a thread of its own, without a lock that the process's end would need."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._num_dropped = descriptor, 0
        self._lines: queue.Queue[str] = queue.Queue(_HELD)
        threading.Thread(target=self._write, name="hardpoint-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for what was logged to be written, for a second at most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_SECONDS)

    def _write(self) -> None:
        while True:
            text = self._lines.get() + "\n"
            if dropped := self._num_dropped:
                self._num_dropped = 0
                text += f"hardpoint: {dropped} lines after this one were dropped: nobody read the log\n"
            data = text.encode(errors="backslashreplace")
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except OSError:  # the reader is gone
                    break
            self._lines.task_done()
