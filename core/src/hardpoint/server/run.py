"""Running a server: its socket, its engine, and how both end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from hardpoint.config import EngineConfig
from hardpoint.engine.processes.child_process import keep_what_was_loaded
from hardpoint.parsers import choose_parsers
from hardpoint.server.app import create_app
from hardpoint.server.host import EngineHost
from hardpoint.server.protocol import TimedProtocol
from hardpoint.server.response_store import ResponseStore
from hardpoint.server.service import Service
from hardpoint.server.settings import ServerSettings
from hardpoint_plugin_api import ConfigChange, ConfigError, EngineDeadError

if TYPE_CHECKING:
    from hardpoint.server.traces import Traces

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 5
"""How long connections may take to close once every request has ended."""
_WATCH_SECONDS = 0.5
"""How often is looked whether an engine that is built again when it fails was given up."""


def serve(config: EngineConfig, settings: ServerSettings) -> None:
    """Serve until a signal says otherwise; see Server. Raises ConfigError, and whatever building an engine raises."""
    _share_log(settings)
    config = _with_restarts(config)
    choose_parsers(config)  # a misspelt name is said before the model is loaded for nothing
    Server(config, settings).run_until_stopped()


class Server(uvicorn.Server):
    """Listens while the model loads, and answers what can be answered.

    The first SIGTERM, SIGINT or SIGHUP stops admission (503); open requests may go on until the deadline, then they get
    an error, and everything is freed. A second one ends them at once.
    """

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self.service = Service(EngineHost(config), settings)
        context = None if settings.tls is None else settings.tls.context()
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                loop="asyncio",
                http=TimedProtocol.within(settings.head_timeout),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=settings.access_log,
                server_header=False,
                proxy_headers=False,
                ssl_context_factory=None if context is None else lambda *_: context,
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
        )
        self._socket = _listen(settings)
        try:
            self.service.store = _store(settings)
            self.service.traces = _traces(settings)
        except BaseException:
            self._socket.close()
            raise
        self._stop: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._num_signals = 0
        self._given_up: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """Where it listens, as a URL, with the port that the system chose; ``unix:PATH`` for a Unix socket."""
        if self._socket.family == socket.AF_UNIX:
            return f"unix:{self._socket.getsockname()}"
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self.service.settings.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def port(self) -> int:
        """The port where it listens."""
        return int(self._socket.getsockname()[1])

    def run_until_stopped(self) -> None:
        """Serve in an event loop of its own. Raises whatever building the engine raises."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup, say, has it ignored
            self._loop.add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)
        logger.info("listening on %s", self.address)
        loading = asyncio.create_task(self._load())
        watching = asyncio.create_task(self._watch())
        try:
            await self.serve(sockets=[self._socket])
        finally:
            watching.cancel()
            await self.service.host.stop(0)
            await self.service.close()
            self._socket.close()
            if self.service.settings.uds is not None:
                self.service.settings.uds.unlink(missing_ok=True)
        await loading
        if self._given_up is not None:
            raise EngineDeadError(self._given_up)

    async def _watch(self) -> None:
        """End the server with an engine that was to be built again, and was given up: whoever started it can do more.

        Where failures are final from the start, the server stays and says so.
        """
        host = self.service.host
        while host.config.restarts_engine and self._given_up is None:
            await asyncio.sleep(_WATCH_SECONDS)
            if (why := host.why_dead) is not None:
                self._given_up = why
                self.should_exit = True

    async def _load(self) -> None:
        try:
            await self.service.host.start()
        except BaseException:
            self.should_exit = True
            raise
        if self.service.host.state == "ready":
            keep_what_was_loaded()
            logger.info("ready: %s", ", ".join(self.service.model_names))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does; runs between any two instructions of the main thread."""
        self._num_signals += 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop, signal.Signals(sig).name, self._num_signals > 1)

    def stop(self, why: str, at_once: bool = False) -> None:
        """Stop serving, and at once where it is stopping already. To be called in the server's event loop."""
        deadline = 0.0 if at_once else self.service.settings.shutdown_deadline
        logger.info("%s: %s", why, "ending at once" if at_once else f"open requests have {deadline:g} seconds to end")
        if self._stop is None:
            self._stop = asyncio.create_task(self._drain(deadline))
        elif at_once:
            self._ending = asyncio.create_task(self.service.host.stop(0))
            self.force_exit = self.should_exit = True

    async def _drain(self, deadline: float) -> None:
        self.service.host.stop_admission()
        try:
            await self.service.host.stop(deadline)
        finally:
            self.should_exit = True


def _store(settings: ServerSettings) -> ResponseStore | None:
    if settings.response_store_bytes == 0:
        return None
    return ResponseStore(settings.response_store, settings.response_store_bytes, settings.response_store_hours * 3600)


def _traces(settings: ServerSettings) -> Traces | None:
    if settings.otlp_traces_endpoint is None:
        return None
    from hardpoint.server.traces import Traces

    return Traces(settings.otlp_traces_endpoint)


def _with_restarts(config: EngineConfig) -> EngineConfig:
    """A server builds its engine again unless told otherwise, where that can be done."""
    if config.core_process is False or config.executor_kind == "torchrun":
        return config
    wish = ConfigChange("on_engine_failure", "restart", "a server's requests outlive its engine")
    return config if config.on_engine_failure is not None else config.with_changes([wish])[0]


def _share_log(settings: ServerSettings) -> None:
    """Send what uvicorn logs where Hardpoint's own log goes: warnings, and requests where they are wanted."""
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        log = logging.getLogger(name)
        log.handlers, log.propagate = list(logging.getLogger("hardpoint").handlers), False
        log.setLevel(level if settings.access_log else logging.WARNING)


def _listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens. Raises ConfigError, before a model is loaded for nothing."""
    if settings.uds is not None:
        return _listen_on_path(settings.uds)
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter for a name that is too long
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--host {settings.host}: {why}; give an address of this machine") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by connections; frees those whose client takes nothing
            milliseconds = int(settings.write_timeout * 1000)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise _cannot_listen(settings, error) from None
    listening.setblocking(False)
    return listening


def _listen_on_path(path: Path) -> socket.socket:
    """A Unix socket that listens at ``path``, where a server that has gone may have left one. Raises ConfigError."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            _check_unused(path)
            path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ConfigError(f"--uds {path}: cannot listen there: {error.strerror or error}") from None
    except ConfigError:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


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
