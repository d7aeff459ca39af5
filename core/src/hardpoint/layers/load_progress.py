"""Log lines that tell how far the loading of weights has come."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""Between two lines; a load that takes less has none."""


class LoadProgress:
    """``total`` is the number of tensors, None where it is not known."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._of = title, "" if total is None else f" of {total}"
        self._count = self._nbytes = 0
        self._began = self._told = time.monotonic()

    def note(self, nbytes: int) -> None:
        """Count one tensor that was read."""
        self._count += 1
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._told >= SECONDS:
            self._told = now
            rate = self._nbytes / (now - self._began)
            logger.info(
                "%s: %d%s tensors read, %.2f GB, %.2f GB/s",
                self._title,
                self._count,
                self._of,
                self._nbytes / 1e9,
                rate / 1e9,
            )
