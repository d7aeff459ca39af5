"""ASGI middleware: API keys, size and concurrency limits, open-request count."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import time
import uuid
from contextlib import ExitStack, nullcontext

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.server import page
from hardpoint.server.errors import ApiError, error_response
from hardpoint.server.service import Service
from hardpoint.server.settings import ServerSettings

_OPEN_TO_ALL = {"/health", "/ping", "/ready", *page.PATHS}
"""Paths for probes, which have no key, and for browsers, which have none yet."""


SEND = "hardpoint.send"
"""Where a scope has what really sends. A stream's events go there, past every middleware between: see watched.py."""
ADDED_HEADERS = "hardpoint.headers"
"""Where a scope has the list of headers that its response gets in addition."""
REQUEST_ID = "hardpoint.request_id"
"""Where a scope has the id of its request."""
OWNER = "hardpoint.owner"
"""Where a scope has what stands for its request's key: empty on a server without keys."""
_ID = re.compile(r"[!-~]{1,128}")
_LOOPBACK_NAME = re.compile(r"(.+\.)?localhost\.?", re.IGNORECASE)


class Gate:
    """Refuses requests without a valid key (401), above a limit (429), too large (413) or too slow (408).

    A request is counted until the last part of its answer is sent, and no longer: a client that has an answer and asks
    again at once must not meet its own former request in the limit, in whichever process of the server.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [key.encode() for key in service.settings.api_keys]
        self._hosts = _allowed_hosts(service.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, status, counted = self._service.metrics, 0, ExitStack()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *scope[ADDED_HEADERS]]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                counted.close()
            await send(message)

        given = Headers(scope=scope).get("x-request-id", "")
        scope[SEND], scope[REQUEST_ID] = send, given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope[OWNER] = ""
        scope[ADDED_HEADERS] = [(b"x-request-id", scope[REQUEST_ID].encode())]
        traces = self._service.traces
        with counted, nullcontext() if traces is None else traces.following(Headers(scope=scope)):
            metrics.open_requests.inc()
            counted.callback(lambda: metrics.answered(scope, status))
            counted.callback(metrics.open_requests.dec)
            await self._pass(scope, receive, noting, counted)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, counted: ExitStack) -> None:
        is_post, settings = scope["method"] == "POST", self._service.settings
        try:
            headers = Headers(scope=scope)
            if self._hosts is not None:
                self._check_host(headers)
            if self._keys and scope["path"] not in _OPEN_TO_ALL:
                scope[OWNER] = self._owner(headers)
            if is_post:
                self._service.host.check_admits()
                _check_length(headers, settings.max_body_bytes)
                if not self._service.open.enter(settings.max_concurrent_requests):
                    raise self._too_many()
                counted.callback(self._service.open.end)
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        if not is_post:
            await self._app(scope, receive, send)
            return
        body = _Body(receive, settings.max_body_bytes, settings.body_timeout)
        await self._app(scope, body.receive, send)

    def _too_many(self) -> ApiError:
        most = self._service.settings.max_concurrent_requests
        if self._service.host.state == "restarting":  # the server's fault, and not the clients'
            return ApiError(
                503,
                f"the engine is restarting, and {most} requests wait for it, the limit of this "
                "server (--max-concurrent-requests); try again later",
                code="restarting",
            )
        return ApiError(
            429,
            f"{most} requests are open, the limit of this server (--max-concurrent-requests); try again later",
            code="too_many_requests",
        )

    def _check_host(self, headers: Headers) -> None:
        """Refuse a name that is not this server's: a web page may have its own name point here (DNS rebinding)."""
        host = headers.get("host", "").lower()
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.rpartition(":")[0] or host
        assert self._hosts is not None
        if host and name not in self._hosts and not _is_loopback(name):
            raise ApiError(
                403,
                f"the Host header names {name!r:.100}, which is not this server; start it with --allowed-host NAME, or "
                "with --api-key",
                code="host_not_allowed",
            )

    def _owner(self, headers: Headers) -> str:
        """The name that stands for a request's API key. Raises ApiError 401 without a valid key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        candidate = given.encode("utf-8", "replace")
        matches = [hmac.compare_digest(candidate, key) for key in self._keys]  # all of them, in the same time
        if not any(matches):
            why = "the API key is not one of this server's" if given else "an API key is needed"
            raise ApiError(401, f"{why}; send Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key")
        return hashlib.sha256(candidate).hexdigest()


def _allowed_hosts(settings: ServerSettings) -> frozenset[str] | None:
    """Names that a Host header may have beside those of loopback addresses; None: any.

    Without a key on a loopback address, the address alone keeps others out, so that names are checked.
    """
    own = frozenset(name.lower() for name in settings.allowed_hosts)
    if settings.uds is not None:  # no browser reaches it
        return own or None
    return own if own or (_is_loopback(settings.host) and not settings.api_keys) else None


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return _LOOPBACK_NAME.fullmatch(name) is not None


class _Body:
    """Counts a body's bytes as they come, and the time that they take."""

    def __init__(self, receive: Receive, limit: int, timeout: float) -> None:
        self._receive, self._limit, self._timeout = receive, limit, timeout
        self._deadline = time.monotonic() + timeout
        self._num_bytes, self._complete = 0, False

    async def receive(self) -> Message:
        """The next message. Raises ApiError 413 and 408."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body has not arrived within {self._timeout:g} seconds", code="request_timeout"
            ) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._num_bytes > self._limit:
                raise _too_large(self._num_bytes, self._limit)
        return message


def _check_length(headers: Headers, limit: int) -> None:
    length = headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise _too_large(int(length), limit)


def _too_large(num_bytes: int, limit: int) -> ApiError:
    return ApiError(
        413, f"the body has {num_bytes} bytes or more; this server takes {limit} (--max-body-bytes)", code="too_large"
    )
