"""The log, as the commands show it."""

from __future__ import annotations

import logging


def show_log(level: int = logging.INFO) -> None:
    """Send Hardpoint's log to stderr, one plain line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hardpoint: %(message)s"))
    logger = logging.getLogger("hardpoint")
    logger.handlers = [handler]
    logger.setLevel(level)
