"""One of several processes of a server: it answers HTTP, and shares the engine of the process that started it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

from hardpoint.config import EngineConfig
from hardpoint.engine.frontend.frontend import connect_shared
from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.calls import Failure
from hardpoint.server.fleet_messages import (
    AllLoaded,
    Answered,
    Ask,
    Asked,
    Failed,
    Loaded,
    Ping,
    Pong,
    Stop,
    ToApi,
    Told,
)
from hardpoint.server.host import EngineHost
from hardpoint.server.listening import SharedListener
from hardpoint.server.peers import OpenRequests, Question, T
from hardpoint.server.run import Server, open_store, open_traces, share_log, take_short_turns
from hardpoint.server.service import Service
from hardpoint.server.settings import ServerSettings
from hardpoint_plugin_api import EngineDeadError, HardpointError

_PARENT_GONE_SECONDS = 5.0
"""How long a process may go on once the one that started it is gone."""


@dataclass(frozen=True)
class Place:
    """The resources that a process shares with others, and its ``number`` among them.

    ``engine``: its connection to the hub. ``open_requests`` has a number for each process. ``created``: when the server
    was started. ``loads_first``: others take connections while it loads.
    """

    number: int
    engine: Connection
    listener: socket.socket
    open_requests: MutableSequence[int]
    created: int
    loads_first: bool


def serve_api(
    connection: Connection,
    send: child_process.Sender,
    parent: int,
    config: EngineConfig,
    settings: ServerSettings,
    place: Place,
) -> None:
    """The target of such a process."""
    share_log(settings)
    take_short_turns()
    try:
        connect = functools.partial(connect_shared, connection=place.engine, is_first=place.number == 0)
        service = Service(EngineHost(config, connect), settings)
        service.created = place.created
        service.open = OpenRequests(place.open_requests, place.number)
        service.store, service.traces = open_store(settings, place.number), open_traces(settings)
        asyncio.run(_run(service, connection, send, parent, place))
    except EngineDeadError:  # the process that started this one knows
        pass
    except HardpointError as error:
        send(Failed(Failure.of(error)))


async def _run(service: Service, connection: Connection, send: child_process.Sender, parent: int, place: Place) -> None:
    server = Server(service, SharedListener.of(place.listener))
    peers = ApiPeers(server, send)
    service.peers = peers
    loop = asyncio.get_running_loop()

    def take(message: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: this process ends
            loop.call_soon_threadsafe(peers.take, cast(ToApi, message))

    def listen() -> None:
        child_process.listen(connection, parent, take)
        take(Stop(0))
        time.sleep(_PARENT_GONE_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, name="hardpoint-fleet-reader", daemon=True).start()
    await server.run_until_stopped(loads_first=place.loads_first)


class ApiPeers:
    """The Peers of one of several processes, which are asked by way of the one that started them."""

    def __init__(self, server: Server, send: child_process.Sender) -> None:
        self._server, self._send = server, send
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[list[object]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._are_loaded = asyncio.Event()

    async def ask(self, question: Question[T], service: Service) -> list[T]:
        """The answers of all processes; see Peers."""
        own = await question.answer(service)
        number, answers = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answers
        try:
            self._send(Ask(number, question, own))
            return cast("list[T]", await answers)
        finally:
            del self._asked[number]

    async def all_loaded(self) -> None:
        """Return once every process can serve, or this one is told to end."""
        self._send(Loaded())
        await self._are_loaded.wait()

    def take(self, message: ToApi) -> None:
        """Do what the process that started this one says. To be called in the event loop."""
        if isinstance(message, AllLoaded):
            self._are_loaded.set()
        elif isinstance(message, Stop):
            self._server.stop(message.deadline)
            self._are_loaded.set()
        elif isinstance(message, Ping):
            self._send(Pong())
        elif isinstance(message, Asked):
            task = asyncio.create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Answered) and (answers := self._asked.get(message.number)) is not None:
            answers.set_result(message.answers)

    async def _answer(self, asked: Asked) -> None:
        self._send(Told(asked.number, await asked.question.answer(self._server.service)))
