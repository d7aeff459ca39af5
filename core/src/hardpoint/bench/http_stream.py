"""A client of streamed completions that takes little processor time: it shares the machine with what it measures."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hardpoint.bench.lengths import SyntheticRequest
from hardpoint.bench.load import Timing
from hardpoint.extras import require_extra
from hardpoint_plugin_api import ConfigError, HardpointError

_QUESTION_SECONDS = 30.0
"""Most that a question may take which no model has to answer, connecting included."""


@dataclass(frozen=True)
class StreamClient:
    """Asks the server at ``url`` for ``model``; every request has a connection of its own, and ``timeout`` seconds.

    Any server will do that speaks OpenAI's protocol, takes token ids as a prompt and knows ``ignore_eos``.
    """

    url: str
    model: str = ""
    api_key: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number, or none that can be
            is_address = False
        if not is_address:
            raise ConfigError(f"--url {self.url} is no address of a server; give it as http://HOST:PORT")

    async def get(self, path: str) -> Any:
        """The JSON at ``path``. Raises HardpointError where there is none, OSError where nobody answers."""
        return (await self._exchange("GET", path, b"", _QUESTION_SECONDS)).json()

    async def post(self, path: str, body: object) -> Any:
        """The JSON that answers ``body``. Raises HardpointError where there is none, OSError where nobody answers."""
        return (await self._exchange("POST", path, json.dumps(body).encode(), _QUESTION_SECONDS)).json()

    async def stream(self, request: SyntheticRequest) -> Timing:
        """Have a prompt continued greedily, by exactly as many tokens as the request says. Raises nothing."""
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timing = Timing(time.perf_counter(), num_prompt_tokens=len(request.prompt))
        try:
            answer = await self._exchange("POST", "/v1/completions", json.dumps(body).encode(), self.timeout, timing)
            answer.check_status()
            if "completion_tokens" not in answer.usage:
                raise HardpointError("the server did not say how many tokens came (usage, with include_usage)")
            timing.num_output_tokens = answer.usage["completion_tokens"]
            if timing.num_output_tokens != request.num_output_tokens:
                timing.error = f"{request.num_output_tokens} tokens were asked for, {timing.num_output_tokens} came"
        except (HardpointError, OSError) as error:
            timing.error = f"{type(error).__name__}: {error}"
        timing.ended = time.perf_counter()
        return timing

    async def _exchange(
        self, method: str, path: str, body: bytes, timeout: float, timing: Timing | None = None
    ) -> _Answer:
        """The whole answer. Raises OSError, or HardpointError where it does not come in time or cannot be read."""
        parts = urlsplit(self.url)
        head = [
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {self.api_key}"] if self.api_key else []),
        ]
        loop = asyncio.get_running_loop()
        request = "\r\n".join([*head, "", ""]).encode() + body
        answer = _Answer(self.url + path, request, loop.create_future(), timing)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(timeout) as limit:
                transport, _ = await loop.create_connection(lambda: answer, str(parts.hostname), port, ssl=secure)
                try:
                    await answer.complete
                finally:
                    transport.abort()
        except TimeoutError:
            if not limit.expired():  # the system's own, of connecting
                raise
            raise HardpointError(f"{answer.url} did not answer within {timeout:g} seconds") from None
        return answer


@dataclass
class _Answer(asyncio.Protocol):
    """Sends ``request`` once connected, and notes in ``timing`` when events with choices come."""

    url: str
    request: bytes
    complete: asyncio.Future[None]
    timing: Timing | None
    status: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    _received: bytes = b""
    _now: float = 0.0

    def __post_init__(self) -> None:
        require_extra("serve", "a benchmark of a server")
        from httptools import HttpParserError, HttpResponseParser

        self._parser, self._parser_error = HttpResponseParser(self), HttpParserError

    def check_status(self) -> None:
        """Raise HardpointError for another status than 200."""
        if self.status != 200:
            raise HardpointError(f"{self.url} answered {self.status}: {_shown(self._received)}")

    def json(self) -> Any:
        """The body. Raises HardpointError for another status than 200, and for what is no JSON."""
        self.check_status()
        try:
            return json.loads(self._received)
        except ValueError:
            raise HardpointError(f"{self.url} answered what is no JSON: {_shown(self._received)}") from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except self._parser_error as error:
            self._fail(HardpointError(f"{self.url} answered what cannot be read ({error}): {_shown(data)}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the server closed the connection before the answer's end"))

    def on_body(self, body: bytes) -> None:
        """More of the body has come; called by the parser."""
        self.status = self._parser.get_status_code()
        self._received += body
        if self.timing is None or self.status != 200:
            return
        *events, self._received = self._received.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if b'"choices":[{' in event or b'"choices": [{' in event:
                if self.timing.deliveries[-1:] != [self._now]:
                    self.timing.deliveries.append(self._now)
            elif event.startswith(b'data: {"error"'):
                self._fail(HardpointError(_shown(event)))
            elif b'"usage"' in event:
                self.usage = json.loads(event.removeprefix(b"data: "))["usage"] or self.usage

    def on_message_complete(self) -> None:
        """The answer has ended; called by the parser."""
        self.status = self._parser.get_status_code()
        if not self.complete.done():
            self.complete.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.complete.done():
            self.complete.set_exception(error)


def _shown(data: bytes) -> str:
    """The beginning of what a server sent, for a message."""
    return data.decode(errors="replace")[:300]
