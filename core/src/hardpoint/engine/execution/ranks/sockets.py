"""Connections between ranks that are sockets."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection


def shut(connection: Connection, how: int = socket.SHUT_RDWR) -> None:
    """End a connection for both sides, or one way. Closing it would do so only once no thread waits to read from it."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(how)
    except OSError:
        pass  # the other side was faster


def send_at_once(connection: Connection) -> Connection:
    """Have each message leave when it is sent; returns ``connection``.

    Without it TCP holds a small message back while the one before is not acknowledged, for 40 ms: steps that are
    submitted one behind the other would wait so long.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if same.family != socket.AF_UNIX:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
