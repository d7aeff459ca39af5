"""Batch files: requests of OpenAI's batch format, answered by the server's own handlers without a socket.

The format is https://platform.openai.com/docs/api-reference/batch/request-input: a line of JSON for each request, with
``custom_id``, ``method``, ``url`` and ``body``; each answer is a line with ``custom_id``, ``response`` and ``error``.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from starlette.types import ASGIApp, Message

from hardpoint.config import EngineConfig
from hardpoint.server.app import create_app
from hardpoint.server.host import EngineHost
from hardpoint.server.service import Service
from hardpoint.server.settings import ServerSettings

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""The endpoints that requests of a batch may name."""


class BadLineError(ValueError):
    """A line that is no request: ``custom_id``, where it has one, and why."""

    def __init__(self, custom_id: str | None, reason: str) -> None:
        super().__init__(reason)
        self.custom_id = custom_id


@dataclass(frozen=True)
class BatchRequest:
    """One line of a batch file."""

    custom_id: str
    url: str
    body: Mapping[str, Any]

    @classmethod
    def parse(cls, line: str) -> BatchRequest:
        """Read a line. Raises BadLineError."""
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadLineError(None, f"the line is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise BadLineError(None, "the line is not a JSON object")
        name = given.get("custom_id")
        if not isinstance(name, str) or not name:
            raise BadLineError(None, "custom_id must be a text that is not empty")
        url, body = given.get("url"), given.get("body")
        if given.get("method") != "POST" or url not in URLS:
            raise BadLineError(name, f"method and url must be POST and one of {', '.join(URLS)}")
        if not isinstance(body, dict):
            raise BadLineError(name, "body must be an object")
        if body.get("stream"):
            raise BadLineError(name, "body.stream: answers of a batch are whole; leave it out")
        return cls(name, url, body)


@dataclass
class BatchResult:
    """How many requests were answered, and how many with an error."""

    num_requests: int = 0
    num_errors: int = 0


async def run_batch(
    config: EngineConfig, settings: ServerSettings, lines: Iterable[str], output: TextIO
) -> BatchResult:
    """Answer every line of ``lines`` that is not blank. Returns the counts.

    Each answer is written to ``output`` when it is complete; ``custom_id`` names its request. At most
    ``settings.max_concurrent_requests`` requests are in flight; reading pauses at that number. Raises the errors of
    the engine's start.
    """
    service = Service(EngineHost(config), settings)
    app, result = create_app(service), BatchResult()
    free = asyncio.Semaphore(settings.max_concurrent_requests)

    async def answer(line: str) -> None:
        try:
            written = await _answer(app, line)
        finally:
            free.release()
        result.num_requests += 1
        response = written["response"]
        result.num_errors += response is None or response["status_code"] >= 400
        output.write(json.dumps(written) + "\n")  # in ASCII: an id may hold half a surrogate pair
        output.flush()

    await service.host.start(service.peers)
    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if line.strip():
                    await free.acquire()
                    group.create_task(answer(line))
    finally:
        await service.host.stop(0)
    return result


async def _answer(app: ASGIApp, line: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        request = BatchRequest.parse(line)
    except BadLineError as error:
        answer["custom_id"] = error.custom_id
        answer["error"] = {"code": "invalid_request", "message": str(error)}
        return answer
    status, headers, body = await _call(app, request.url, json.dumps(request.body).encode())
    request_id = headers.get(b"x-request-id", b"").decode()
    answer["custom_id"] = request.custom_id
    answer["response"] = {"status_code": status, "request_id": request_id, "body": json.loads(body)}
    return answer


async def _call(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """The status, headers and body of the answer of ``app`` to a POST of JSON."""
    sent: list[Message] = []
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("localhost", 0),
        "server": ("localhost", 0),
    }
    try:
        await app(scope, receive, send)
    except Exception:  # starlette answers with status 500, and raises the error again for a server to log
        if not any(message["type"] == "http.response.start" for message in sent):
            raise
    start = next(message for message in sent if message["type"] == "http.response.start")
    text = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return start["status"], dict(start["headers"]), text
