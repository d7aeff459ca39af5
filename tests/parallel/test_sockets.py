"""Connections between ranks on several hosts."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection

import pytest

from hardpoint.engine.execution.ranks.sockets import set_up


@pytest.mark.parametrize("lacking", [(), ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE")], ids=["linux", "macos"])
def test_options_that_a_system_has_are_set(lacking: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option of the system's is set, and one that it lacks is left out."""
    options = {"TCP_NODELAY": 1, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_KEEPIDLE": 30, "TCP_USER_TIMEOUT": 60_000}
    numbers = {name: getattr(socket, name) for name in options}
    for name in lacking:
        monkeypatch.delattr(socket, name)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as plain:
        before = {name: plain.getsockopt(socket.IPPROTO_TCP, number) for name, number in numbers.items()}
        set_up(Connection(os.dup(plain.fileno()))).close()
        for name, number in numbers.items():
            expected = before[name] if name in lacking else options[name]
            assert plain.getsockopt(socket.IPPROTO_TCP, number) == expected
        assert plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
