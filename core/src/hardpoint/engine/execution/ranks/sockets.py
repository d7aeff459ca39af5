"""Connections between ranks that are sockets."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection

_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
}
"""A host that answers nothing for 60 seconds is gone, whether or not there is something to send.

By name, since some systems lack some: macOS has no TCP_USER_TIMEOUT.
"""


def shut(connection: Connection, how: int = socket.SHUT_RDWR) -> None:
    """End a connection for both sides, or one way. Closing it would do so only once no thread waits to read from it."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(how)
    except OSError:
        pass  # the other side was faster


def set_up(connection: Connection) -> Connection:
    """Have each message leave when it is sent, and a host that is gone end the connection; returns ``connection``.

    By itself TCP holds a small message back while the one before is not acknowledged, for 40 ms: steps that are
    submitted one behind the other would wait so long. It waits for a host that was switched off for many minutes, and
    forever where there is nothing to send.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if same.family != socket.AF_UNIX:
            for name, value in _OPTIONS.items():
                if (option := getattr(socket, name, None)) is not None:
                    same.setsockopt(socket.IPPROTO_TCP, option, value)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection
