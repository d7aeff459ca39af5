"""The socket that a server listens on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hardpoint.server.settings import ServerSettings
from hardpoint_plugin_api import ConfigError

_BACKLOG = 2048


@contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """A socket that listens as ``settings`` say; closed, and its path removed, when the context ends.

    Raises ConfigError, before a model is loaded for nothing.
    """
    listener = _on_address(settings) if settings.uds is None else _on_path(settings.uds)
    try:
        yield listener
    finally:
        listener.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)


def address_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Where ``listener`` listens, as a URL, with the port that the system chose; ``unix:PATH`` for a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class SharedListener(socket.socket):
    """A listening socket of several processes. Each accepts one connection in a turn of its event loop, where asyncio
    would take all that wait: so that a burst of connections goes to whichever process is free."""

    _has_accepted = False

    @classmethod
    def of(cls, listener: socket.socket) -> SharedListener:
        """The socket itself, which ``listener`` gives up."""
        return cls(listener.family, listener.type, listener.proto, fileno=listener.detach())

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection, and then BlockingIOError, which ends the turn."""
        if self._has_accepted:
            self._has_accepted = False
            raise BlockingIOError
        accepted = super().accept()
        self._has_accepted = True
        return accepted


def _on_address(settings: ServerSettings) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter for a name that is too long
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--host {settings.host}: {why}; give an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by connections; frees those whose client takes nothing
            milliseconds = int(settings.write_timeout * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from None
    listener.setblocking(False)
    return listener


def _on_path(path: Path) -> socket.socket:
    """A Unix socket that listens at ``path``, where a server that has gone may have left one. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            _check_unused(path)
            path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path}: cannot listen there: {error.strerror or error}") from None
    except ConfigError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _check_unused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigError(f"--uds {path}: another server listens there; choose another path")


def _cannot_listen(settings: ServerSettings, error: OSError) -> ConfigError:
    """The error for a socket that cannot be bound, which names the flag at fault."""
    flag, remedy = {
        errno.EADDRINUSE: (
            f"--port {settings.port}",
            f"stop the other server there, or choose another: --port {settings.port + 1}, or --port 0 for any",
        ),
        errno.EACCES: (f"--port {settings.port}", "ports below 1024 are the system administrator's; choose another"),
        errno.EADDRNOTAVAIL: (f"--host {settings.host}", "give an address of this machine, or 0.0.0.0 for all of them"),
    }.get(error.errno or 0, (f"--host {settings.host} --port {settings.port}", "choose others"))
    where = f"{settings.host} port {settings.port}"
    return ConfigError(f"{flag}: cannot listen on {where}: {error.strerror}; {remedy}")
