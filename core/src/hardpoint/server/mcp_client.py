"""Sessions with tool servers that speak the Model Context Protocol (MCP) over streamable HTTP, within limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

T = TypeVar("T")

MAX_TOOLS = 256
"""Tools that one server may have."""
_MAX_PAGES = 16


@dataclass(frozen=True)
class ToolLimits:
    """``seconds`` for a connection, a list of tools, or a call; ``num_bytes`` of each answer of a tool server."""

    seconds: float = 60.0
    num_bytes: int = 2**20


@dataclass(frozen=True)
class ServedTool:
    """A tool of a tool server. ``parameters`` is a JSON schema; ``annotations`` are hints, as the server gave them."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    annotations: dict[str, Any] | None

    @property
    def is_read_only(self) -> bool:
        """Whether the server says that the tool changes nothing."""
        return bool((self.annotations or {}).get("readOnlyHint"))


@dataclass(frozen=True)
class ToolResult:
    """The text of a call's result, or its error in the form of OpenAI's API."""

    output: str | None = None
    error: dict[str, Any] | None = None


class ToolServerError(Exception):
    """A tool server does not answer as it should."""


class ToolSession:
    """A session with the tool server at ``url``; ``close`` ends it.

    The library's client lives in a task of its own: it must be entered and left in one, and those who use a session may
    be several.
    """

    def __init__(self, url: str, headers: Mapping[str, str], limits: ToolLimits) -> None:
        self._limits = limits
        self._jobs: asyncio.Queue[Callable[[Client], Awaitable[None]]] = asyncio.Queue()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(url, dict(headers)))

    @classmethod
    async def open(cls, url: str, headers: Mapping[str, str], limits: ToolLimits) -> Self:
        """Connect. Raises ToolServerError."""
        session = cls(url, headers, limits)
        try:
            await session._within(session._opened)
        except BaseException:
            await session.close()
            raise
        return session

    async def tools(self) -> list[ServedTool]:
        """The server's tools. Raises ToolServerError."""
        return await self._do(_list_tools)

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Errors are in the result."""
        try:
            result = await self._do(lambda client: client.call_tool(name, arguments))
        except MCPError as error:
            return ToolResult(error=_protocol_error(error.error.code, error.error.message))
        except ToolServerError as error:
            return ToolResult(error={"type": "http_error", "code": 502, "message": str(error)})
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]
        if result.is_error:
            return ToolResult(error={"type": "mcp_tool_execution_error", "content": content})
        texts = [block["text"] if block["type"] == "text" else json.dumps(block) for block in content]
        return ToolResult("\n".join(texts))

    async def close(self) -> None:
        """End the connection and its open calls."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _do(self, job: Callable[[Client], Awaitable[T]]) -> T:
        """The result of ``job``, called with the client. Raises MCPError as the server says, and ToolServerError."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run(client: Client) -> None:
            try:
                result = await job(client)
            except (MCPError, ToolServerError) as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self._jobs.put_nowait(run)
        return await self._within(done)

    async def _within(self, wanted: asyncio.Future[T]) -> T:
        """The result of ``wanted``. Raises ToolServerError where it is late, or the session ends before."""
        either: set[asyncio.Future[Any]] = {wanted, self._task}
        done, _ = await asyncio.wait(either, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED)
        if wanted in done:
            return wanted.result()
        wanted.cancel()
        if not done:
            raise ToolServerError(f"it has not answered within {self._limits.seconds:g} seconds")
        error = None if self._task.cancelled() else self._task.exception()
        raise ToolServerError("the connection has ended" if error is None else _said(error))

    async def _run(self, url: str, headers: dict[str, str]) -> None:
        transport = _Bounded(self._limits.num_bytes)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=self._limits.seconds, transport=transport) as http,
            Client(streamable_http_client(url, http_client=http), cache=None) as client,
        ):
            with suppress(asyncio.InvalidStateError):  # nobody waits any more
                self._opened.set_result(None)
            while True:
                await (await self._jobs.get())(client)


class _Bounded(httpx2.AsyncHTTPTransport):
    """Ends an answer that is longer than ``most`` bytes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        response.stream = _BoundedStream(cast(httpx2.AsyncByteStream, response.stream), self._most)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream, self._most = stream, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > self._most:
                raise httpx2.ReadError(f"its answer has more than {self._most} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _list_tools(client: Client) -> list[ServedTool]:
    found: list[ServedTool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            hints = None if tool.annotations is None else tool.annotations.model_dump(by_alias=True, exclude_none=True)
            found.append(ServedTool(tool.name, tool.description, tool.input_schema, hints))
        cursor = page.next_cursor
        if cursor is None or len(found) > MAX_TOOLS:
            break
    if cursor is not None or len(found) > MAX_TOOLS:
        raise ToolServerError(f"it has more than {MAX_TOOLS} tools")
    return found


def _protocol_error(code: int, message: str) -> dict[str, Any]:
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def _said(error: BaseException) -> str:
    """The first error of those that a group holds, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
