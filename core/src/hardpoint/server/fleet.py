"""A server of several processes that share one engine: how they are started, told, restarted and ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import MutableSequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import cast

from hardpoint.config import EngineConfig
from hardpoint.engine.async_engine import has_own_process
from hardpoint.engine.client import OwnedCore, StartCore
from hardpoint.engine.frontend.frontend import serve_other_ranks, start_core
from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.child import API_NAME, Child, hang_up
from hardpoint.engine.remote.hub import Hub
from hardpoint.garbage_collection import keep_what_is_there
from hardpoint.metrics import MetricsSnapshot
from hardpoint.server.api_process import Place, serve_api
from hardpoint.server.fleet_messages import (
    AllLoaded,
    Answered,
    Ask,
    Asked,
    Failed,
    FromApi,
    Loaded,
    Ping,
    Pong,
    Stop,
    Told,
)
from hardpoint.server.listening import address_of
from hardpoint.server.peers import Question, ReadCounts
from hardpoint.server.run import open_store
from hardpoint.server.settings import ServerSettings
from hardpoint.server.stop_signals import StopSignals
from hardpoint_plugin_api import EngineDeadError, EngineError

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 4.0
"""How long a process may take over a question of another; what it does not say is left out."""
_MAX_RESTARTS = 5
_RESTART_WINDOW = 600.0
"""The server ends with the process that would be the sixth to be started again within so many seconds."""
_NUM_PINGS = 5
"""A process that leaves so many pings in a row unanswered hangs. Counting them, and not seconds alone, spares processes
that were stopped together with this one."""
_END_SECONDS = 15.0
"""Beyond the deadline, how long a process may take to end before it is killed."""


@dataclass(eq=False)
class _Api:
    """One process. ``counts``: what it said last that it had counted. ``num_unanswered``: pings without an answer.
    ``why_killed``: what it did not do in time; empty for one that was not killed. ``began``: when it began to load.
    """

    place: Place
    child: Child
    is_loaded: bool = False
    has_failed: Exception | None = None
    num_unanswered: int = 0
    why_killed: str = ""
    began: float = field(default_factory=time.monotonic)
    counts: MetricsSnapshot = field(default_factory=lambda: MetricsSnapshot(()))


@dataclass
class _Gathering:
    """A question that some processes are to answer still."""

    question: Question[object]
    by: _Api
    number: int
    answers: list[object]
    waits_for: set[_Api]


class Fleet:
    """Holds the engine and the socket, and has ``settings.api_server_count`` processes serve them.

    A process that dies is started again; its requests are aborted, and others do not notice. One that hangs is killed
    first: its event loop has to answer pings. The engine's failures are recovered from here. Lives in one event loop.
    """

    def __init__(
        self, config: EngineConfig, settings: ServerSettings, listener: socket.socket, start: StartCore = start_core
    ) -> None:
        self._config, self._settings, self._listener = config, settings, listener
        self._start_core = start
        self._open = cast("MutableSequence[int]", RawArray("q", settings.api_server_count))
        self._apis: set[_Api] = set()
        self._gatherings: dict[int, _Gathering] = {}
        self._numbers = itertools.count()
        self._counts_of_ended = MetricsSnapshot(())
        self._restarts: deque[float] = deque()
        self._hub: Hub | None = None
        self._ready_at: float | None = None
        """When the core got ready, by ``time.monotonic``."""
        self._waiting: list[Connection] = []
        """The hub's ends of the processes that it does not know yet."""
        self._created = int(time.time())
        self._is_stopping = self._is_ready = False
        self._deadline = settings.shutdown_deadline
        self._error: Exception | None = None
        self._has_ended = asyncio.Event()

    async def run_until_stopped(self) -> None:
        """Serve until a signal says otherwise. Raises whatever building the engine raises, EngineDeadError for one that
        was given up, EngineError where processes die again and again."""
        self._config = serve_other_ranks(self._config)
        self._loop = asyncio.get_running_loop()
        with ExitStack() as exits:
            self._settings = _with_shared_store(self._settings, exits)
            exits.enter_context(StopSignals(self._settings.shutdown_deadline, self._stop).handled())
            core = self._start_core(self._config, own_process=has_own_process(self._config))
            try:
                logger.info("listening on %s", address_of(self._listener, self._settings))
                for number in range(self._settings.api_server_count):
                    self._start(number, loads_first=False)
                loading = asyncio.create_task(self._load(core))
                pinging = asyncio.create_task(self._ping())
                await self._has_ended.wait()
                pinging.cancel()
            finally:
                await asyncio.to_thread(core.close if self._hub is None else self._hub.close)
                for api in tuple(self._apis):
                    api.child.process.kill()
            await loading
        if self._error is not None:
            raise self._error

    async def _load(self, core: OwnedCore) -> None:
        """Wait for the core, and share it."""
        timeout = self._config.core_start_timeout if has_own_process(self._config) else None
        try:
            await asyncio.to_thread(core.wait_until_ready, timeout)
        except Exception as error:
            self._end(error)
            return
        keep_what_is_there()
        self._ready_at = time.monotonic()
        self._hub = Hub(core, self._core_has_ended)
        for connection in self._waiting:
            self._hub.join(connection)
        self._waiting.clear()

    def _core_has_ended(self, error: EngineDeadError) -> None:
        """End the server with an engine that was to be built again; else the processes stay, and say so."""
        if self._config.restarts_engine:
            self._loop.call_soon_threadsafe(self._end, error)

    def _start(self, number: int, *, loads_first: bool) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._open[number] = 0
        place = Place(number, theirs, self._listener, self._open, self._created, loads_first)
        try:
            child = Child(f"{API_NAME}{number}", serve_api, self._config, self._settings, place)
        finally:
            theirs.close()
        api = _Api(place, child)
        self._apis.add(api)
        if self._hub is None:
            self._waiting.append(ours)
        else:
            self._hub.join(ours)
        threading.Thread(target=self._read, args=(api,), name=f"{API_NAME}{number}-reader", daemon=True).start()

    async def _ping(self) -> None:
        """Ping all processes again and again, and kill one that does not answer, or does not get ready: ``_gone``
        replaces it."""
        while not self._is_stopping:
            await asyncio.sleep(self._settings.api_timeout / _NUM_PINGS)
            for api in self._apis:
                if why := self._overdue(api):
                    api.why_killed = why
                    api.child.process.kill()
                elif api.is_loaded:  # loading, its event loop may wait for long
                    api.num_unanswered += 1
                    api.child.send(Ping())

    def _overdue(self, api: _Api) -> str:
        """The reason to kill a process; empty where there is none. A process that loads waits for the core first."""
        limit, timeout = self._config.core_start_timeout, self._settings.api_timeout
        if not api.is_loaded and self._ready_at is not None:
            is_late = time.monotonic() > max(api.began, self._ready_at) + limit
            return f"was not ready {limit} s after the engine (--core-start-timeout)" if is_late else ""
        return f"did not react for {timeout:g} s" if api.num_unanswered >= _NUM_PINGS else ""

    def _read(self, api: _Api) -> None:
        for message in api.child.received():
            self._loop.call_soon_threadsafe(self._take, api, cast(FromApi, message))
        self._loop.call_soon_threadsafe(self._gone, api)

    def _take(self, api: _Api, message: FromApi) -> None:
        if isinstance(message, Loaded):
            api.is_loaded = True
            self._tell_if_all_loaded(api)
        elif isinstance(message, Pong):
            api.num_unanswered = 0
        elif isinstance(message, Failed):
            api.has_failed = message.failure.original()
        elif isinstance(message, Ask):
            self._gather(api, message)
        else:
            self._told(api, message)

    def _tell_if_all_loaded(self, api: _Api) -> None:
        """Have all processes serve once all can; one that is started again serves at once."""
        if self._is_ready:
            api.child.send(AllLoaded())
        elif len(self._apis) == self._settings.api_server_count and all(each.is_loaded for each in self._apis):
            self._is_ready = True
            for each in self._apis:
                each.child.send(AllLoaded())
            names = self._settings.served_model_names or (self._config.model,)
            logger.info("ready: %s, by %d processes", ", ".join(names), len(self._apis))

    def _gather(self, api: _Api, ask: Ask) -> None:
        """Put the question of one process to the others."""
        if isinstance(ask.question, ReadCounts):
            api.counts = cast(MetricsSnapshot, ask.own)
        number, others = next(self._numbers), self._apis - {api}
        self._gatherings[number] = _Gathering(ask.question, api, ask.number, [ask.own], set(others))
        for other in others:
            other.child.send(Asked(number, ask.question))
        self._loop.call_later(_ANSWER_SECONDS, self._answer, number)
        self._answer_if_complete(number)

    def _told(self, api: _Api, told: Told) -> None:
        gathering = self._gatherings.get(told.number)
        if gathering is None:  # it took too long
            return
        if isinstance(gathering.question, ReadCounts):
            api.counts = cast(MetricsSnapshot, told.answer)
        else:
            gathering.answers.append(told.answer)
        gathering.waits_for.discard(api)
        self._answer_if_complete(told.number)

    def _answer_if_complete(self, number: int) -> None:
        if not self._gatherings[number].waits_for:
            self._answer(number)

    def _answer(self, number: int) -> None:
        """Tell the process that asked what the others said."""
        gathering = self._gatherings.pop(number, None)
        if gathering is None or gathering.by not in self._apis:
            return
        answers = gathering.answers
        if isinstance(gathering.question, ReadCounts):  # of one that is silent, what it said last
            answers = [*answers, *(api.counts for api in self._apis - {gathering.by}), self._counts_of_ended]
        gathering.by.child.send(Answered(gathering.number, answers))

    def _gone(self, api: _Api) -> None:
        """A process has ended: start another in its place, unless the server ends."""
        self._apis.discard(api)
        self._open[api.place.number] = 0
        self._counts_of_ended = MetricsSnapshot.total_of([self._counts_of_ended, api.counts.counters])
        for number, gathering in tuple(self._gatherings.items()):
            gathering.waits_for.discard(api)
            if not gathering.waits_for:
                self._answer(number)
        how, hint = child_process.how_it_ended(api.child.process.exitcode)
        if api.why_killed:
            how, hint = f"{api.why_killed} and was killed", "it may have been stopped"
        pid, stack = api.child.process.pid, api.child.stack
        api.child.close()
        if self._is_stopping:
            if not self._apis:
                self._has_ended.set()
            return
        said = f"the server's process {api.place.number} ({pid}) {how}"
        if stack:
            logger.error("%s:\n%s", said, stack)
        if api.has_failed is not None:
            self._end(api.has_failed)
        elif not self._may_restart():
            self._end(EngineError(f"{said}: {hint}; {_MAX_RESTARTS} were started again before, and no other is"))
        else:
            logger.error("%s: %s; its requests are aborted, and another is started", said, hint)
            _end_responses(self._settings, api.place.number)
            self._start(api.place.number, loads_first=self._is_ready)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - _RESTART_WINDOW:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= _MAX_RESTARTS

    def _stop(self, deadline: float) -> None:
        """Have every process end within ``deadline`` seconds; 0: at once."""
        self._is_stopping = True
        for api in self._apis:
            api.child.send(Stop(deadline))
        for connection in self._waiting:  # for a core that is loading
            hang_up(connection)
        self._loop.call_later(deadline + _END_SECONDS, self._kill)
        if not self._apis:
            self._has_ended.set()

    def _kill(self) -> None:
        for api in self._apis:
            api.child.process.kill()

    def _end(self, error: Exception) -> None:
        """End the server with ``error``."""
        if self._error is None and not self._is_stopping:
            self._error = error
            self._stop(0)


def _with_shared_store(settings: ServerSettings, exits: ExitStack) -> ServerSettings:
    """``settings`` with a file for responses that all processes open. Raises ConfigError."""
    if settings.response_store_bytes == 0:
        return settings
    if settings.response_store is None:
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="hardpoint-", ignore_cleanup_errors=True))
        settings = replace(settings, response_store=Path(folder) / "responses")
    _end_responses(settings)
    return settings


def _end_responses(settings: ServerSettings, maker: int | None = None) -> None:
    """Mark the responses that a process was making as failed; None: all processes."""
    if (store := open_store(settings)) is not None:
        store.end_open(maker)
        store.close()
