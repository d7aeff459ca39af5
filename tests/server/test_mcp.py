"""Tool servers of ``/v1/responses``: a real MCP server over streamable HTTP, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

from tests.support.engines import until
from tests.support.serving import RunningServer, running_server

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %} calls {{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}\n{% endfor %}assistant: "
)


class Tools:
    """A tool server, and the calls that it got."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.headers: list[str] = []
        server = MCPServer("weather")

        @server.tool(annotations=ToolAnnotations(read_only_hint=True))
        def get_weather(city: str = "Oslo") -> str:
            """Say how the weather is."""
            self.called.append(city)
            return "rain, 7 degrees"

        @server.tool()
        def fail() -> str:
            """Do nothing well."""
            raise ValueError("it is out of order")

        @server.tool()
        def flood() -> str:
            """Say too much."""
            return "x" * 300_000

        @server.tool()
        async def sleep() -> str:
            """Take too long."""
            await asyncio.sleep(20)
            return "late"

        app = server.streamable_http_app()

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            self.headers += [value.decode() for name, value in scope.get("headers", ()) if name == b"authorization"]
            await app(scope, receive, send)

        self.socket = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(noting, log_level="critical", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    tools = Tools()
    yield tools
    tools.close()


@pytest.fixture(scope="module")
def server(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = ["--mcp-allowed-host", tools.host, "--mcp-timeout", "5", "--mcp-max-bytes", "200000"]
    with running_server("--chat-template", str(template), "--tool-parser", "hermes", *flags) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def tool(tools: Tools, **fields: Any) -> dict[str, Any]:
    own = {"type": "mcp", "server_label": "w", "server_url": f"http://{tools.host}/mcp", "require_approval": "never"}
    return own | fields


def respond(client: openai.OpenAI, servers: Any, name: str = "get_weather", **options: Any) -> Any:
    """A response whose first turn has to call ``name``, which the demo model then does."""
    defaults: dict[str, Any] = {"model": "demo", "input": "How is it?", "temperature": 0, "max_output_tokens": 200}
    defaults |= {"tool_choice": {"type": "mcp", "server_label": "w", "name": name}, "max_tool_calls": 1}
    return client.responses.create(tools=servers, **defaults | options)


def test_a_call_is_made_and_the_model_goes_on(client: openai.OpenAI, tools: Tools) -> None:
    """The next turn reads the call and its result, as of a conversation in which the client had made the call."""
    tools.called.clear()
    answer = respond(client, [tool(tools, authorization="token", allowed_tools=["get_weather"])])
    listed, call, *rest = answer.output
    assert (listed.type, [each.name for each in listed.tools]) == ("mcp_list_tools", ["get_weather"])
    assert listed.tools[0].input_schema["properties"]["city"]["type"] == "string"
    assert (call.type, call.name, call.server_label, call.status) == ("mcp_call", "get_weather", "w", "completed")
    assert (call.output, call.error, len(tools.called)) == ("rain, 7 degrees", None, 1)
    assert [item.type for item in rest] == ["message"]
    assert set(tools.headers) == {"Bearer token"}
    (told,) = answer.tools
    assert told.server_label == "w"
    assert not told.model_dump().get("authorization"), "it is a secret"
    function = {"type": "function", "name": "get_weather", "parameters": listed.tools[0].input_schema}
    function["description"] = "Say how the weather is."
    asked = {"type": "function_call", "call_id": "c", "name": call.name, "arguments": call.arguments}
    result = {"type": "function_call_output", "call_id": "c", "output": call.output}
    items: Any = [{"role": "user", "content": "How is it?"}, asked, result]
    most = {"temperature": 0, "max_output_tokens": 200 - answer.usage.output_tokens + 1}
    again = client.responses.create(model="demo", input=items, tools=[function], tool_choice="none", **most)  # type: ignore[call-overload]
    assert answer.output_text.startswith(again.output_text[:20])
    more: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 4}
    followed = client.responses.create(input="Sure?", previous_response_id=answer.id, **more)
    items += [{"role": "assistant", "content": answer.output_text}, {"role": "user", "content": "Sure?"}]
    sent = client.responses.create(input=items, **more)
    assert (followed.usage.input_tokens, followed.output_text) == (sent.usage.input_tokens, sent.output_text)


def test_a_stream_tells_of_calls(client: openai.OpenAI, tools: Tools) -> None:
    servers = [tool(tools)]
    whole = respond(client, servers, max_output_tokens=150)
    events = list(respond(client, servers, max_output_tokens=150, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    listed = ["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"]
    assert kinds[2:8] == [f"response.{kind}" for kind in (*listed, "output_item.added", "mcp_call.in_progress")]
    done = kinds.index("response.mcp_call_arguments.done")
    assert set(kinds[8:done]) == {"response.mcp_call_arguments.delta"}
    assert kinds[done + 1 : done + 3] == ["response.mcp_call.completed", "response.output_item.done"]
    assert "".join(event.delta for event in events[8:done]) == events[done].arguments
    final = events[-1].response
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output[1].arguments == whole.output[1].arguments
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage


def test_what_goes_wrong_with_a_call_is_told_to_the_model(client: openai.OpenAI, tools: Tools) -> None:
    """An error of the tool, an answer that is too long or too late; the response goes on."""
    failed = respond(client, [tool(tools, allowed_tools=["fail"])], "fail").output[1]
    assert (failed.status, failed.output, failed.error.type) == ("failed", None, "mcp_tool_execution_error")
    assert "Error executing tool fail" in failed.error.content[0]["text"]
    for name, words in (("flood", "more than 200000 bytes"), ("sleep", "has not answered within 5 seconds")):
        answer = respond(client, [tool(tools, allowed_tools=[name])], name)
        call = answer.output[1]
        assert (call.status, call.error.type) == ("failed", "http_error"), name
        assert words in call.error.message
        assert answer.output[-1].type == "message"


def test_calls_are_approved(client: openai.OpenAI, tools: Tools) -> None:
    """Without approval no call is made. Whether it is given is the next request's to say, which goes on then."""
    tools.called.clear()
    careful = [tool(tools, require_approval={"never": {"read_only": False}})]
    asked = respond(client, careful)
    request = asked.output[-1]
    assert (request.type, request.name, tools.called) == ("mcp_approval_request", "get_weather", [])
    events = [event.type for event in respond(client, careful, stream=True)]
    assert events[-3:] == ["response.output_item.added", "response.output_item.done", "response.completed"]
    options = {"tool_choice": "none", "previous_response_id": asked.id, "max_output_tokens": 8}
    said = {"type": "mcp_approval_response", "approval_request_id": request.id}
    denied = respond(client, careful, input=[said | {"approve": False, "reason": "too wet"}], **options)
    assert ([item.type for item in denied.output], tools.called) == (["message"], [])
    approved = respond(client, careful, input=[said | {"approve": True}], **options)
    call, message = approved.output
    assert (call.approval_request_id, call.output, message.type) == (request.id, "rain, 7 degrees", "message")
    assert len(tools.called) == 1
    assert approved.usage.input_tokens != denied.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="there is no request for approval"):
        respond(client, careful, input=[said | {"approval_request_id": "other", "approve": True}], **options)
    with pytest.raises(openai.BadRequestError, match="tools has no tool 'get_weather'"):
        respond(client, [], input=[said | {"approve": True}], **options)


def test_in_the_background(client: openai.OpenAI, tools: Tools) -> None:
    begun = respond(client, [tool(tools)], background=True)
    until(lambda: client.responses.retrieve(begun.id).status not in ("queued", "in_progress"), 60)
    assert [item.type for item in client.responses.retrieve(begun.id).output][:2] == ["mcp_list_tools", "mcp_call"]


def test_what_is_refused(client: openai.OpenAI, tools: Tools) -> None:
    for url in ("http://127.0.0.1:1/mcp", f"http://localhost:{tools.host.partition(':')[2]}/mcp"):
        with pytest.raises(openai.PermissionDeniedError, match="start it with --mcp-allowed-host"):
            respond(client, [tool(tools, server_url=url)])
    with pytest.raises(openai.BadRequestError, match="must begin with http"):
        respond(client, [tool(tools, server_url="file:///etc/passwd")])
    with pytest.raises(openai.BadRequestError, match="give the server_url"):
        respond(client, [{"type": "mcp", "server_label": "w", "connector_id": "connector_gmail"}])
    with pytest.raises(openai.BadRequestError, match="two servers have a tool"):
        respond(client, [tool(tools), tool(tools, server_label="v")])
    with pytest.raises(openai.APIStatusError, match="did not list its tools") as error:
        respond(client, [tool(tools, server_url=f"http://{tools.host}/elsewhere")])
    assert (error.value.status_code, error.value.code) == (424, "mcp_server_error")
