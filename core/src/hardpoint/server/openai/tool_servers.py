"""Tool servers of ``/v1/responses``: whose tools the model may call, who approves, and what becomes of calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from hardpoint.server.errors import ApiError
from hardpoint.server.fields import ProtocolModel
from hardpoint.server.settings import ServerSettings

if TYPE_CHECKING:
    from hardpoint.server.mcp_client import ServedTool, ToolResult, ToolSession

MAX_ROUNDS = 32
"""Turns of one response: behind the calls of the last but one, the model has to answer."""
_PORTS = {"http": 80, "https": 443}


class ToolFilter(ProtocolModel):
    """Tools by name, or those that change nothing; both where both are given."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def matches(self, tool: ServedTool) -> bool:
        """True where ``tool`` is allowed."""
        is_named = self.tool_names is None or tool.name in self.tool_names
        return is_named and self.read_only in (None, tool.is_read_only)


class ApprovalFilter(ProtocolModel):
    """Tools whose calls are approved ``always`` or ``never``; others always."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpTool(ProtocolModel):
    """A tool server, whose tools the model may call."""

    type: Literal["mcp"]
    server_label: Annotated[str, Field(min_length=1, max_length=128)]
    server_url: str | None = None
    server_description: str | None = None
    connector_id: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None

    def allows(self, tool: ServedTool) -> bool:
        """Whether the model may call ``tool``."""
        allowed = self.allowed_tools
        return allowed is None or (tool.name in allowed if isinstance(allowed, list) else allowed.matches(tool))

    def needs_approval(self, tool: ServedTool) -> bool:
        """Whether the client has to approve each call of ``tool``."""
        rule = self.require_approval
        if not isinstance(rule, ApprovalFilter):
            return rule != "never"
        if rule.always is not None and rule.always.matches(tool):
            return True
        return rule.never is None or not rule.never.matches(tool)

    def told(self) -> dict[str, Any]:
        """The tool as a response shows it, without secrets."""
        return self.model_dump(exclude={"headers", "authorization", "connector_id"})


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the model may call, and its server's label."""

    label: str
    tool: ServedTool
    needs_approval: bool

    def as_function(self) -> dict[str, Any]:
        """The tool in the form of chat completions, which templates know."""
        function = {"name": self.tool.name, "description": self.tool.description, "parameters": self.tool.parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class ToolServers:
    """The tool servers of one response: an async context manager, which ends their sessions.

    ``lists`` are the items that tell the client of their tools; ``offered`` are the tools by name.
    """

    def __init__(self) -> None:
        self.lists: list[dict[str, Any]] = []
        self.offered: dict[str, OfferedTool] = {}
        self._sessions: dict[str, ToolSession] = {}
        self._exits = AsyncExitStack()

    @classmethod
    async def connect(cls, servers: Sequence[McpTool], settings: ServerSettings) -> ToolServers:
        """Ask each server for its tools. Raises ApiError: 403 for a host that is not allowed, 424 for a server that
        does not answer as it should, 400 for what else is wrong."""
        found = cls()
        try:
            for number, server in enumerate(servers):
                await found._add(server, settings, f"tools[{number}]")
        except BaseException:
            await found.close()
            raise
        return found

    async def call(self, label: str, name: str, arguments: str) -> ToolResult:
        """Call a tool with ``arguments`` as the model wrote them. Errors are in the result."""
        from hardpoint.server.mcp_client import ToolResult

        try:
            read = json.loads(arguments or "{}")
        except ValueError as error:
            read = error
        if not isinstance(read, dict):
            wrong = {"type": "mcp_protocol_error", "code": -32602, "message": "the arguments are no JSON object"}
            return ToolResult(error=wrong)
        return await self._sessions[label].call(name, read)

    def new_lists(self, history: Sequence[Any]) -> list[dict[str, Any]]:
        """The items that tell of tools, of servers that ``history`` does not tell of."""
        known = {item.server_label for item in history if item.type == "mcp_list_tools"}
        return [each for each in self.lists if each["server_label"] not in known]

    async def close(self) -> None:
        """End the sessions."""
        await self._exits.aclose()

    async def _add(self, server: McpTool, settings: ServerSettings, place: str) -> None:
        url = _checked_url(server, settings, place)
        if server.server_label in self._sessions:
            raise ApiError(400, f"{place}: two servers have the label {server.server_label!r}", param="tools")
        from hardpoint.server.mcp_client import ToolLimits, ToolServerError, ToolSession

        headers = dict(server.headers or {})
        if server.authorization is not None:
            headers["authorization"] = f"Bearer {server.authorization}"
        limits = ToolLimits(settings.mcp_timeout, settings.mcp_max_bytes)
        try:
            session = await ToolSession.open(url, headers, limits)
            self._exits.push_async_callback(session.close)
            tools = await session.tools()
        except ToolServerError as error:
            said = f"{place}: the MCP server {server.server_label!r} did not list its tools: {error}"
            raise ApiError(424, said, param="tools", code="mcp_server_error") from None
        self._sessions[server.server_label] = session
        allowed = [tool for tool in tools if server.allows(tool)]
        for tool in allowed:
            if tool.name in self.offered:
                raise ApiError(
                    400, f"{place}: two servers have a tool {tool.name!r}; choose by allowed_tools", param="tools"
                )
            self.offered[tool.name] = OfferedTool(server.server_label, tool, server.needs_approval(tool))
        self.lists.append(
            {
                "type": "mcp_list_tools",
                "server_label": server.server_label,
                "tools": [
                    {
                        "name": tool.name,
                        "description": tool.description,
                        "input_schema": tool.parameters,
                        "annotations": tool.annotations,
                    }
                    for tool in allowed
                ],
                "error": None,
            }
        )


def _checked_url(server: McpTool, settings: ServerSettings, place: str) -> str:
    """The server's URL, at a host that the operator allows. Raises ApiError."""
    if server.connector_id is not None or server.server_url is None:
        raise ApiError(400, f"{place}: there are no connectors; give the server_url", param="tools")
    try:
        parts = urlsplit(server.server_url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        raise ApiError(400, f"{place}.server_url is no URL", param="tools") from None
    if port is None or not parts.hostname:
        raise ApiError(400, f"{place}.server_url must begin with http:// or https://", param="tools")
    allowed = {name.lower() for name in settings.mcp_allowed_hosts}
    if not {parts.hostname, f"{parts.hostname}:{port}"} & allowed:
        raise ApiError(
            403,
            f"{place}: this server calls no MCP server at {parts.hostname}:{port}; start it with --mcp-allowed-host "
            f"{parts.hostname}:{port}",
            param="tools",
            code="mcp_host_not_allowed",
        )
    return server.server_url


def mcp_call(
    own_id: str,
    label: str,
    name: str,
    arguments: str,
    output: str | None = None,
    error: dict[str, Any] | None = None,
    *,
    status: str = "completed",
    approval: str | None = None,
) -> dict[str, Any]:
    """A call of a tool, as an item of a response."""
    return {
        "id": own_id,
        "type": "mcp_call",
        "status": status if error is None else "failed",
        "server_label": label,
        "name": name,
        "arguments": arguments,
        "output": output,
        "error": error,
        "approval_request_id": approval,
    }


async def approved_calls(own: Sequence[Any], history: Sequence[Any], servers: ToolServers) -> list[dict[str, Any]]:
    """Make the calls that the items ``own`` approve; requests for approval are among them, or in ``history``.

    Raises ApiError 400 for an approval of something else.
    """
    everything = [*history, *own]
    requests = {item.id: item for item in everything if item.type == "mcp_approval_request"}
    called = {item.approval_request_id for item in everything if item.type == "mcp_call"}
    found = []
    for answer in own:
        if answer.type != "mcp_approval_response":
            continue
        request = requests.get(answer.approval_request_id)
        if request is None:
            raise ApiError(
                400, f"input: there is no request for approval {answer.approval_request_id!r:.80}", param="input"
            )
        if not answer.approve or request.id in called:
            continue
        offered = servers.offered.get(request.name)
        if offered is None or offered.label != request.server_label:
            wanted = f"{request.name!r:.80} of a server {request.server_label!r:.80}"
            raise ApiError(400, f"input: a call is approved, and tools has no tool {wanted}", param="input")
        result = await servers.call(request.server_label, request.name, request.arguments)
        own_id = f"mcp_{uuid.uuid4().hex}"
        found.append(
            mcp_call(
                own_id,
                request.server_label,
                request.name,
                request.arguments,
                result.output,
                result.error,
                approval=request.id,
            )
        )
    return found
