"""Responses that are kept, through OpenAI's own client: going on from them, the background, owners, bounds."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from hardpoint.server.errors import ApiError
from hardpoint.server.gate import OWNER
from hardpoint.server.openai.kept_responses import retrieve
from hardpoint.server.response_store import MissingResponseError, ResponseStore, StoredResponse
from hardpoint_plugin_api import ConfigError
from tests.server.test_responses import WEATHER, respond
from tests.support.engines import until
from tests.support.serving import RunningServer, running_server

LONG = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """A response of the background, once it is complete."""
    until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"), 60)
    return client.responses.retrieve(response_id)


def test_a_stream_of_a_response_that_is_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept any more. That it had no stream would be untrue."""
    store = ResponseStore(tmp_path / "responses.sqlite", 2**20, 60.0)
    store.put("me", StoredResponse({"id": "resp_1", "status": "in_progress"}, []), [])
    found = store.events

    def events(owner: str, response_id: str) -> list[str] | None:
        store.delete(owner, response_id)
        return found(owner, response_id)

    monkeypatch.setattr(store, "events", events)
    request: Any = SimpleNamespace(scope={OWNER: "me"})
    service: Any = SimpleNamespace(store=store)
    with pytest.raises(ApiError, match="is not kept, or not any more") as raised:
        asyncio.run(retrieve("resp_1", request, service, stream=True))
    assert raised.value.status == 404
    store.close()


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI) -> None:
    """The same as by a conversation that is sent whole; instructions are each request's own."""
    first = respond(client, instructions="Be short.")
    second = respond(client, input="And of ships?", previous_response_id=first.id)
    third = respond(client, input=[{"role": "user", "content": "Go on."}], previous_response_id=second.id)
    assert (first.previous_response_id, third.previous_response_id) == (None, second.id)
    told = [("Tell me about the sea.", first), ("And of ships?", second)]
    whole: list[Any] = [item for text, answer in told for item in ({"role": "user", "content": text}, *answer.output)]
    again = respond(client, input=[*whole, {"role": "user", "content": "Go on."}], store=False)
    assert (again.output_text, again.usage.input_tokens) == (third.output_text, third.usage.input_tokens)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A server whose chat template writes calls and their results."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls or [] %} calls {{ call.function.name }} {{ call.function.arguments | tojson }}"
        "{% endfor %}\n{% endfor %}assistant: "
    )
    with (
        running_server("--chat-template", str(template), "--tool-parser", "hermes") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_calls_go_on_from_a_response(with_tools: openai.OpenAI) -> None:
    """The result of a call is sent alone, and means the same as the whole conversation."""
    once: Any = {"parallel_tool_calls": False, "max_output_tokens": 250}
    called = respond(with_tools, tools=[WEATHER], tool_choice="required", **once)
    (call,) = [item for item in called.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "17 degrees"}
    answer = respond(with_tools, input=[result], previous_response_id=called.id)
    whole: list[Any] = [{"role": "user", "content": "Tell me about the sea."}, *called.output, result]
    again = respond(with_tools, input=whole)
    assert (answer.output_text, answer.usage.input_tokens) == (again.output_text, again.usage.input_tokens)
    (item,) = with_tools.responses.input_items.list(answer.id).data
    assert (item.type, item.call_id) == ("function_call_output", call.call_id)  # type: ignore[union-attr]


def test_what_is_kept_is_what_was_answered(client: openai.OpenAI) -> None:
    answer = respond(client, metadata={"trip": "7"})
    assert client.responses.retrieve(answer.id) == answer
    final = list(respond(client, input="Sing.", stream=True))[-1].response
    assert client.responses.retrieve(final.id).output_text == final.output_text
    parts = [{"role": "user", "content": str(number)} for number in range(5)]
    many = respond(client, input=parts)
    page = client.responses.input_items.list(many.id, limit=2, order="asc")
    texts = [item.to_dict()["content"][0]["text"] for item in page]  # type: ignore[index]  # the client turns pages
    assert texts == ["0", "1", "2", "3", "4"]
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="is not kept"):
            call(answer.id)
    with pytest.raises(openai.BadRequestError, match="is not kept") as error:
        respond(client, previous_response_id=answer.id)
    assert error.value.code == "previous_response_not_found"


def test_what_is_not_to_be_kept_is_not(client: openai.OpenAI) -> None:
    answer = respond(client, store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="background: the response has to be kept"):
        respond(client, store=False, background=True)


def test_the_background(client: openai.OpenAI) -> None:
    begun = respond(client, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    whole = ended(client, begun.id)
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 16)
    assert whole.output_text == respond(client).output_text
    assert client.responses.cancel(begun.id) == whole, "it has ended, and stays as it is"
    twice = [respond(client, background=True, extra_headers={"x-request-id": "same"}).id for _ in range(2)]
    assert [ended(client, each).status for each in twice] == ["incomplete"] * 2
    assert len(set(twice)) == 2


def test_the_background_as_a_stream(server: RunningServer, client: openai.OpenAI) -> None:
    """A client that leaves comes back for the events that it has not seen, while they are made and afterwards."""
    whole = list(respond(client, stream=True, background=True))
    assert [event.type for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    final = whole[-1].response
    assert (whole[-1].type, final.background) == ("response.incomplete", True)
    assert final.output_text == respond(client).output_text
    assert client.responses.retrieve(final.id) == final
    assert list(client.responses.retrieve(final.id, stream=True)) == whole
    assert list(client.responses.retrieve(final.id, stream=True, starting_after=5)) == whole[6:]
    assert list(client.responses.retrieve(final.id, stream=True, starting_after=999)) == []

    seen: list[Any] = []
    with respond(client, stream=True, background=True, **LONG) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 20:
                break
    assert client.responses.retrieve(seen[0].response.id).status == "in_progress", "the client left, and it goes on"
    after = seen[-1].sequence_number
    seen += list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=after))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == seen[-1].response.output_text
    server.wait_until_idle()

    plain = respond(client, background=True)
    with pytest.raises(openai.BadRequestError, match="not made with background and stream"):
        client.responses.retrieve(plain.id, stream=True)


def test_a_stream_of_the_background_that_is_cancelled(server: RunningServer, client: openai.OpenAI) -> None:
    with respond(client, stream=True, background=True, **LONG) as stream:
        seen = [next(stream) for _ in range(8)]
        assert client.responses.cancel(seen[0].response.id).status == "cancelled"
        seen += stream
    assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "cancelled")
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=8)) == seen[9:]
    server.wait_until_idle()


def test_what_is_made_in_the_background_can_be_cancelled(server: RunningServer, client: openai.OpenAI) -> None:
    begun = respond(client, background=True, **LONG)
    until(lambda: server.sample("hardpoint_running_requests") == 1)
    with pytest.raises(openai.BadRequestError, match="not complete yet"):
        respond(client, previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    server.wait_until_idle()
    assert client.responses.cancel(begun.id).status == "cancelled"
    gone = respond(client, background=True, **LONG)
    client.responses.delete(gone.id)
    server.wait_until_idle()
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.responses.cancel(respond(client).id)


def test_owners_restarts_and_servers_that_end(tmp_path: Path) -> None:
    """A key's responses are its own; a file outlives its server, and what that was making has failed."""
    file = tmp_path / "responses.sqlite"
    flags = ["--api-key", "ann", "--api-key", "bob", "--response-store", str(file), "--shutdown-deadline", "0"]
    with running_server(*flags, headers={"authorization": "Bearer ann"}) as server:
        ann, bob = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("ann", "bob"))
        answer = respond(ann)
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            respond(bob, previous_response_id=answer.id)
        open_one = respond(ann, background=True, **LONG)
        until(lambda: server.sample("hardpoint_running_requests") == 1)
        assert server.stop() == 0
    store = ResponseStore(file, 2**20, 3600)
    with sqlite3.connect(file) as other:
        owners = {row[0] for row in other.execute("SELECT owner FROM responses")}
    other.close()
    (owner,) = owners
    assert "ann" not in owner
    assert store.get(owner, answer.id).response["output"][0]["content"][0]["text"] == answer.output_text
    assert store.get(owner, open_one.id).response["status"] in ("failed", "cancelled")
    store.close()


def kept(number: int, size: int = 10, status: str = "completed", previous: str | None = None) -> StoredResponse:
    return StoredResponse({"id": f"r{number}", "status": status}, [{"text": "x" * size}], previous)


def test_a_store_is_bounded_in_bytes() -> None:
    store = ResponseStore(None, 4000, 3600)
    for number in range(3):
        store.put("o", kept(number, 1000))
    store.conversation("o", "r0")
    store.put("o", kept(3, 1000))
    found: list[str | None] = []
    for number in range(4):
        try:
            found.append(store.get("o", f"r{number}").response_id)
        except MissingResponseError:
            found.append(None)
    assert found == ["r0", None, "r2", "r3"], "the least recently used goes first"
    store.put("o", kept(0, 5000))
    with pytest.raises(MissingResponseError):
        store.get("o", "r0")
    store.close()


def test_a_store_forgets_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = ResponseStore(None, 4000, 100), time.time()
    store.put("o", kept(0))
    store.put("o", kept(1, previous="r0"))
    monkeypatch.setattr(time, "time", lambda: now + 90)
    assert [each.response_id for each in store.conversation("o", "r1")] == ["r0", "r1"]
    monkeypatch.setattr(time, "time", lambda: now + 180)
    assert store.get("o", "r0").response_id == "r0", "the conversation went on"
    monkeypatch.setattr(time, "time", lambda: now + 300)
    with pytest.raises(MissingResponseError):
        store.get("o", "r0")
    store.close()


def test_files_of_other_programs_are_refused(tmp_path: Path) -> None:
    text, newer = tmp_path / "text", tmp_path / "newer"
    text.write_text("no database at all, but a text that is long enough to be seen as none")
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    for file, words in ((text, "file is not a database"), (newer, "its form is 99"), (tmp_path, "unable to open")):
        with pytest.raises(ConfigError, match=words):
            ResponseStore(file, 1000, 1)


def test_what_a_server_was_making_when_it_was_killed_has_failed(tmp_path: Path) -> None:
    stores = [ResponseStore(tmp_path / "s", 4000, 100, maker) for maker in range(2)]
    for number, store in enumerate(stores):
        store.put("o", kept(number, status="in_progress"))
    stores[0].end_open(1)
    assert [stores[1].get("o", f"r{number}").response["status"] for number in range(2)] == ["in_progress", "failed"]
    stores[0].end_open()
    assert stores[1].get("o", "r0").response["status"] == "failed"
    for store in stores:
        store.close()


def test_events_are_kept_with_a_response_and_count(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "s", 4000, 100)
    store.put("o", kept(1))
    store.put("o", kept(2), ["a" * 1000, "b"])
    assert (store.events("o", "r1"), store.events("o", "r2")) == (None, ["a" * 1000, "b"])
    store.put("o", kept(3), ["c" * 3500])
    with pytest.raises(MissingResponseError):
        store.get("o", "r2")
    store.close()


def test_a_store_of_the_form_before_is_read(tmp_path: Path) -> None:
    """It has no column for events."""
    store = ResponseStore(tmp_path / "s", 4000, 100)
    store.put("o", kept(1))
    store.close()
    with sqlite3.connect(tmp_path / "s") as db:
        db.executescript("ALTER TABLE responses DROP COLUMN events; PRAGMA user_version=2;")
    db.close()
    store = ResponseStore(tmp_path / "s", 4000, 100)
    store.put("o", kept(2), ["a"])
    assert (store.events("o", "r1"), store.events("o", "r2")) == (None, ["a"])
    store.close()


def test_processes_share_the_bound_of_a_store(tmp_path: Path) -> None:
    """A response that one process has put counts for the other, and both may write at once."""
    stores = [ResponseStore(tmp_path / "s", 4000, 100, maker) for maker in range(2)]

    def fill(store: ResponseStore, first: int) -> None:
        for number in range(first, first + 20):
            store.put("o", kept(number, 1000))

    threads = [threading.Thread(target=fill, args=(store, 100 * number)) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sqlite3.connect(tmp_path / "s") as db:
        count, held, total = db.execute(
            "SELECT count(*), sum(responses.size), total.size FROM responses, total"
        ).fetchone()
    db.close()
    assert (count, held) == (3, total)
    for store in stores:
        store.close()
