"""Connections between ranks that are sockets."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection


def shut(connection: Connection) -> None:
    """End a connection for both sides. Closing it would do so only once no thread waits to read from it."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was faster
