"""Client libraries of Python, each tried: ``python foreign_clients.py NAME URL``.

Run by tests/server/test_foreign_clients.py, in an environment with those libraries and without Hardpoint.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Literal

import pydantic

HELLO = [{"role": "user", "content": "Tell me about the sea."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 400}


class City(pydantic.BaseModel, extra="forbid"):
    """A city. Closed: the demo model would write other keys for ever."""

    name: Literal["Paris", "Oslo"]


class Trip(pydantic.BaseModel, extra="forbid"):
    """A trip to a city; its schema has a reference."""

    to: City


def litellm(url: str) -> None:
    """An answer, a stream, and the error for a prompt that is too long."""
    library: Any = import_module("litellm")
    options = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 8}
    assert library.completion(messages=HELLO, **options).choices[0].message.content
    chunks = list(library.completion(messages=HELLO, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    try:
        library.completion(messages=[{"role": "user", "content": "sea " * 5000}], **options)
    except library.ContextWindowExceededError:
        return
    raise AssertionError("a prompt that is too long was not recognised")


def langchain(url: str) -> None:
    """An answer, a stream, and a nested model by a forced call and by a schema."""
    library: Any = import_module("langchain_openai")
    model = library.ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=400)
    assert model.invoke("Tell me about the sea.", max_tokens=8).content
    assert "".join(chunk.content for chunk in model.stream("Tell me about the sea.", max_tokens=8))
    for method in ("function_calling", "json_schema"):
        trip = model.with_structured_output(Trip, method=method).invoke("Where?")
        assert trip.to.name in ("Paris", "Oslo")


def pydantic_ai(url: str) -> None:
    """A nested model as the output of an agent."""
    library: Any = import_module("pydantic_ai")
    models: Any = import_module("pydantic_ai.models.openai")
    providers: Any = import_module("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel("demo", provider=providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = library.Agent(model, output_type=Trip, model_settings={**GREEDY, "parallel_tool_calls": False})
    assert agent.run_sync("Where?").output.to.name in ("Paris", "Oslo")


def instructor(url: str) -> None:
    """A nested model by a forced call."""
    library: Any = import_module("instructor")
    openai_library: Any = import_module("openai")
    client = library.from_openai(openai_library.OpenAI(base_url=f"{url}/v1", api_key="none"))
    trip = client.chat.completions.create(model="demo", response_model=Trip, messages=HELLO, **GREEDY)
    assert trip.to.name in ("Paris", "Oslo")


def openai_agents(url: str) -> None:
    """An agent with a tool that it does not call."""
    library: Any = import_module("agents")
    openai_library: Any = import_module("openai")
    library.set_tracing_disabled(True)
    client = openai_library.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    def weather(city: str) -> str:
        """The weather in a city."""
        return f"rain in {city}"

    agent = library.Agent(
        name="guide",
        model=library.OpenAIChatCompletionsModel(model="demo", openai_client=client),
        tools=[library.function_tool(weather)],
        model_settings=library.ModelSettings(temperature=0, max_tokens=8),
    )
    assert library.Runner.run_sync(agent, "Tell me about the sea.").final_output


def openai(url: str) -> None:
    """A nested model by a tool and by a schema, a stream, and a response."""
    library: Any = import_module("openai")
    client = library.OpenAI(base_url=f"{url}/v1", api_key="none")
    tool = library.pydantic_function_tool(Trip)
    asked = {"model": "demo", "messages": HELLO, **GREEDY}
    forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "Trip"}}}
    (call,) = client.chat.completions.parse(**asked, **forced).choices[0].message.tool_calls
    assert call.function.parsed_arguments.to.name in ("Paris", "Oslo")
    assert client.chat.completions.parse(**asked, response_format=Trip).choices[0].message.parsed
    chunks = client.chat.completions.create(**(asked | {"max_tokens": 8}), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert client.responses.create(model="demo", input="Tell me about the sea.", max_output_tokens=16).output_text


def anthropic(url: str) -> None:
    """A nested model by a forced call, a stream, and a count of tokens."""
    library: Any = import_module("anthropic")
    client = library.Anthropic(base_url=url, api_key="none")
    tool = {"name": "travel", "input_schema": Trip.model_json_schema()}
    asked = {"model": "demo", "messages": HELLO}
    greedy = {"max_tokens": 400, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked, **greedy, tools=[tool], tool_choice={"type": "any"})
    assert Trip.model_validate(next(block.input for block in answer.content if block.type == "tool_use"))
    with client.messages.stream(**asked, max_tokens=8) as stream:
        assert "".join(stream.text_stream)
    assert client.messages.count_tokens(**asked).input_tokens > 5


CLIENTS = {
    "openai": openai,
    "anthropic": anthropic,
    "litellm": litellm,
    "langchain-openai": langchain,
    "pydantic-ai-slim[openai]": pydantic_ai,
    "instructor": instructor,
    "openai-agents": openai_agents,
}
"""The clients by what pip installs."""

if __name__ == "__main__":
    CLIENTS[sys.argv[1]](sys.argv[2])
