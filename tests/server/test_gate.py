"""When a request is counted: until its answer has been sent, and not when the client already has the answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.types import ASGIApp, Message

from hardpoint.config import EngineConfig
from hardpoint.server.app import create_app
from hardpoint.server.host import EngineHost
from hardpoint.server.run import open_store
from hardpoint.server.service import Service
from hardpoint.server.settings import ServerSettings
from tests.support.engines import SMALL

pytest.importorskip("hardpoint_cpu")

SHORT: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "whole": ("POST", "/v1/completions", {"prompt": "a", **SHORT}),
    "stream": ("POST", "/v1/completions", {"prompt": "a", "stream": True, **SHORT}),
    "refused": ("POST", "/v1/completions", {"prompt": "a", "max_tokens": -1}),
    "unknown": ("POST", "/nowhere", {}),
    "get": ("GET", "/v1/models", None),
}


@dataclass
class Client:
    """Sends one request, and looks at the server's counts as the last part of the answer arrives."""

    service: Service
    app: ASGIApp
    status: int = 0
    body: bytes = b""
    counts: list[tuple[int, float, float]] = field(default_factory=list)

    async def ask(self, method: str, path: str, body: object) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}
        parts = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()
            raise AssertionError("it never leaves")

        async def send(message: Message) -> None:
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.counts.append((self.service.open.total, *self.of_metrics()))

        await self.app(scope, receive, send)
        self.counts.append((self.service.open.total, *self.of_metrics()))

    def of_metrics(self) -> tuple[float, float]:
        """Requests being answered, and answered."""
        lines = generate_latest(self.service.metrics.registry).decode().splitlines()
        names = "hardpoint_http_open_requests", "hardpoint_http_requests_total"
        counts = [sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names]
        return counts[0], counts[1]


def test_an_answer_that_has_arrived_is_not_counted_as_open() -> None:
    """Else a client that asks again at once may be refused for its own former request (--max-concurrent-requests)."""

    async def ask() -> dict[str, Client]:
        service = Service(EngineHost(EngineConfig.create(model="demo", **SMALL)), ServerSettings())
        service.store = open_store(service.settings)
        app = create_app(service)
        await service.host.start(service.peers)
        try:
            clients = {}
            for name, request in REQUESTS.items():
                clients[name] = Client(service, app)
                await clients[name].ask(*request)
            return clients
        finally:
            await service.close()
            await service.host.engine.close()

    clients = asyncio.run(ask())
    assert [client.status for client in clients.values()] == [200, 200, 400, 404, 200]
    assert clients["stream"].body.endswith(b"data: [DONE]\n\n")
    for number, client in enumerate(clients.values(), start=1):
        assert client.counts == [(0, 0, number)] * 2, "at the last part of the answer, and when all is done"


def test_a_response_of_the_background_is_counted_once() -> None:
    """Its own request is over when the client has the answer; it is counted until it is made."""

    async def ask() -> Client:
        service = Service(EngineHost(EngineConfig.create(model="demo", **SMALL)), ServerSettings())
        service.store = open_store(service.settings)
        client = Client(service, create_app(service))
        await service.host.start(service.peers)
        try:
            body = {"input": "a", "max_output_tokens": 500, "background": True, "ignore_eos": True}
            await client.ask("POST", "/v1/responses", body)
            return client
        finally:
            await service.close()
            await service.host.engine.close()

    client = asyncio.run(ask())
    assert (client.status, client.counts) == (200, [(1, 0, 1)] * 2)
