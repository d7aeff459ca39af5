"""Logs that appear once per owner: an engine, a set of plugins, a platform. Nothing is silenced process-wide."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable

_logged: dict[int, set[Hashable]] = {}
"""Messages already logged, by the id of their owner; an entry goes when its owner does."""


def log_once(logger: logging.Logger, level: int, key: Hashable, message: str, scope: object) -> None:
    """Log ``message``, unless something was logged under ``key`` for the owner ``scope`` before.

    ``scope`` is held weakly and compared by identity; any object that allows weak references will do.
    """
    if id(scope) not in _logged:
        weakref.finalize(scope, _logged.pop, id(scope), None).atexit = False
        _logged[id(scope)] = set()
    if key not in _logged[id(scope)]:
        _logged[id(scope)].add(key)
        logger.log(level, "%s", message, stacklevel=2)
