"""Running a server: its socket, its processes, its engine, and how they end."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from hardpoint.config import EngineConfig
from hardpoint.engine.async_engine import connect_own
from hardpoint.engine.client import StartCore
from hardpoint.engine.frontend.frontend import serve_launched, start_core
from hardpoint.engine.model_check import check_model
from hardpoint.garbage_collection import keep_what_is_there
from hardpoint.parsers import choose_parsers
from hardpoint.server.app import create_app
from hardpoint.server.host import EngineHost
from hardpoint.server.listening import address_of, listening
from hardpoint.server.protocol import TimedProtocol
from hardpoint.server.response_store import ResponseStore
from hardpoint.server.service import Service
from hardpoint.server.settings import ServerSettings
from hardpoint.server.stop_signals import StopSignals
from hardpoint_plugin_api import ConfigChange, EngineDeadError

if TYPE_CHECKING:
    from hardpoint.server.traces import Traces

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 5
"""How long connections may take to close once every request has ended."""
_TURN_SECONDS = 0.001
"""After so long a thread that runs Python gives way to another. A token passes through three threads, and a new request
through two more: with Python's 5 ms a busy server answers later, and carries less (docs/measurements/serving.md)."""
_WATCH_SECONDS = 0.5
"""How often is looked whether an engine that is built again when it fails was given up."""


def serve(config: EngineConfig, settings: ServerSettings) -> None:
    """Serve until a signal says otherwise: by one process, or by several that share an engine.

    The first SIGTERM, SIGINT or SIGHUP stops the server within its deadline, a second one at once. Raises ConfigError,
    and whatever building an engine raises.
    """
    share_log(settings)
    config = _with_restarts(config)
    choose_parsers(config)  # a misspelt name is said before the model is loaded for nothing
    check_model(config)
    config = serve_launched(config)
    with listening(settings) as listener:
        serve_at(listener, config, settings)


def serve_at(
    listener: socket.socket, config: EngineConfig, settings: ServerSettings, start: StartCore = start_core
) -> None:
    """Serve at ``listener``, a socket that listens; see ``serve``. ``start`` starts the engine's core."""
    take_short_turns()
    if settings.api_server_count > 1:
        from hardpoint.server.fleet import Fleet

        asyncio.run(Fleet(config, settings, listener, start).run_until_stopped())
    else:
        _serve_alone(listener, config, settings, start)


def _serve_alone(listener: socket.socket, config: EngineConfig, settings: ServerSettings, start: StartCore) -> None:
    """Serve by this process, with an engine of its own."""
    service = Service(EngineHost(config, partial(connect_own, start=start)), settings)
    server = Server(service, listener, lambda: logger.info("ready: %s", ", ".join(service.model_names)))
    service.store, service.traces = open_store(settings), open_traces(settings)
    if service.store is not None:
        service.store.end_open()
    asyncio.run(_run(server, address_of(listener, settings)))


async def _run(server: Server, address: str) -> None:
    service = server.service
    signals = StopSignals(service.settings.shutdown_deadline, server.stop)
    with signals.handled():
        logger.info("listening on %s", address)
        await server.run_until_stopped()


class Server(uvicorn.Server):
    """Answers at a socket while the model loads, and serves until it is stopped.

    ``stop`` ends admission (503); open requests may go on until the deadline, then they get an error, and everything is
    freed. A second call may end them at once. Signals are its caller's business.
    """

    def __init__(
        self, service: Service, listener: socket.socket, when_ready: Callable[[], None] = lambda: None
    ) -> None:
        """``when_ready`` is called once the server, with all its processes, can serve."""
        self.service, self._listener, self._when_ready = service, listener, when_ready
        settings = service.settings
        context = None if settings.tls is None else settings.tls.context()
        super().__init__(
            uvicorn.Config(
                create_app(service),
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
        self._stop: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._given_up: str | None = None

    async def run_until_stopped(self, *, loads_first: bool = False) -> None:
        """Serve until ``stop`` is called. ``loads_first``: connections are taken once it is ready, as others take them.

        Raises whatever building the engine raises, and EngineDeadError for one that was given up.
        """
        loading = asyncio.create_task(self._load())
        watching = asyncio.create_task(self._watch())
        try:
            if loads_first:
                await asyncio.wait({loading})
            await self.serve(sockets=[self._listener])
        finally:
            watching.cancel()
            await self.service.host.stop(0)
            await self.service.close()
        await loading
        if self._given_up is not None:
            raise EngineDeadError(self._given_up)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield

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
            await self.service.host.start(self.service.peers)
        except BaseException:
            self.should_exit = True
            raise
        if self.service.host.state == "ready":
            keep_what_is_there()
            self._when_ready()

    def stop(self, deadline: float) -> None:
        """Stop serving within ``deadline`` seconds; where it is stopping already, 0 ends it at once. To be called in
        the server's event loop."""
        if self._stop is None:
            self._stop = asyncio.create_task(self._drain(deadline))
        elif deadline == 0:
            self._ending = asyncio.create_task(self.service.host.stop(0))
            self.force_exit = self.should_exit = True

    async def _drain(self, deadline: float) -> None:
        self.service.host.stop_admission()
        try:
            await self.service.host.stop(deadline)
        finally:
            self.should_exit = True


def open_store(settings: ServerSettings, maker: int = 0) -> ResponseStore | None:
    """The store of responses, for the process ``maker``; None where none are kept. Raises ConfigError."""
    if settings.response_store_bytes == 0:
        return None
    return ResponseStore(
        settings.response_store, settings.response_store_bytes, settings.response_store_hours * 3600, maker
    )


def open_traces(settings: ServerSettings) -> Traces | None:
    """The sender of spans; None where no endpoint was given."""
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


def take_short_turns() -> None:
    """Have threads of this process that run Python wait for each other no longer than _TURN_SECONDS each."""
    sys.setswitchinterval(_TURN_SECONDS)


def share_log(settings: ServerSettings) -> None:
    """Send what uvicorn logs where Hardpoint's own log goes: warnings, and requests where they are wanted."""
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        log = logging.getLogger(name)
        log.handlers = list(logging.getLogger("hardpoint").handlers)
        log.propagate = not log.handlers  # a process of a server has the root's alone
        log.setLevel(level if settings.access_log else logging.WARNING)
