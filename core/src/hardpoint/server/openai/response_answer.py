"""Writing the answer to a request to ``/v1/responses``: its items, its events, and the turns that it takes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from hardpoint.engine.outputs import PositionLogprobs
from hardpoint.server.event_log import EventLog
from hardpoint.server.generation import Usage
from hardpoint.server.items import Change, Item, Items
from hardpoint.server.openai.kept_responses import Keeper, error_event, last_event
from hardpoint.server.openai.logprobs import chat_logprobs, tokenizer_of
from hardpoint.server.openai.tool_servers import MAX_ROUNDS, ToolServers, mcp_call
from hardpoint.server.service import Service
from hardpoint.server.turn import ToolChoice, Turn, TurnRequest
from hardpoint.server.watched import named_event


class Answer:
    """Writes one request's answer.

    A turn that calls tools of tool servers is followed by another, once the calls are made: until the model calls none,
    or calls something that the client has to see to.
    """

    wants_logprobs = False
    num_top = 0
    """Log-probabilities beside each token's own."""
    max_calls: int | None = None
    """Calls of tool servers, of all turns together."""

    def __init__(
        self,
        head: dict[str, Any],
        asked: TurnRequest,
        ask: Callable[[list[dict[str, Any]]], TurnRequest],
        service: Service,
        keeper: Keeper,
        servers: ToolServers,
    ) -> None:
        """``head``: what the response says beside its output. ``ask`` makes the request for the next turn, behind the
        items that it is given."""
        self._head, self._asked, self._ask = head, asked, ask
        self._service, self._keeper, self._servers = service, keeper, servers
        self._items, self._ids = Items(), list[str]()
        self._kinds: list[str] = []
        """The items' types in a response."""
        self._first: list[dict[str, Any]] = []
        self._positions: list[PositionLogprobs] = []
        self._scored: dict[int, list[PositionLogprobs]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._usage, self._reason = Usage(0, 0, 0), ""
        self._number = 0
        self.log = EventLog()
        """The events of a response that is made in the background and streamed."""

    def begin_with(self, items: Iterable[dict[str, Any]]) -> None:
        """Have the output begin with these items, which have no ids yet where they are new."""
        self._first += items

    def begun(self, status: str) -> dict[str, Any]:
        """The response before there is any output."""
        return self._head | {"status": status, "incomplete_details": None, "output": [], "usage": None}

    async def kept(self, turn: Turn) -> dict[str, Any]:
        """The whole response, once it is kept."""
        whole = await self.whole(turn)
        await self._keeper.keep(whole)
        return whole

    async def whole(self, turn: Turn) -> dict[str, Any]:
        """The whole response."""
        async with aclosing(self._changes(turn)) as parts:
            async for changes in parts:
                for change in changes:
                    self._note(change)
        return self._response()

    async def events(self, turn: Turn) -> AsyncGenerator[bytes, None]:
        """The stream. The response is kept before its last event."""
        written = [self._event("response.created"), self._event("response.in_progress")]
        async for events in self._progressed(turn, written):
            yield events
        whole = self._response()
        await self._keeper.keep(whole)
        yield self._last(whole)

    async def logged(self, turn: Turn) -> dict[str, Any]:
        """The whole response, whose events go to ``log``."""
        started = [self._event("response.created", "queued"), self._event("response.queued", "queued")]
        async for events in self._progressed(turn, [*started, self._event("response.in_progress")]):
            self.log.add(events)
        whole = self._response()
        self.log.add(self._last(whole))
        return whole

    def end(self, response: dict[str, Any]) -> None:
        """See BackgroundStream."""
        self.log.add(last_event(response, len(self.log.events)))

    async def _progressed(self, turn: Turn, written: list[bytes]) -> AsyncGenerator[bytes, None]:
        """The events ``written``, and those of the output as it grows."""
        async with aclosing(self._changes(turn)) as parts:
            async for changes in parts:
                for change in changes:
                    self._note(change)
                    written.append(self._written(change))
                if written:
                    yield b"".join(written)
                    written = []

    async def _changes(self, turn: Turn) -> AsyncGenerator[list[Change], None]:
        """The changes of the items, of all turns."""
        try:
            if self._first:
                yield [change for value in self._first for change in self._items.insert(value)]
            num_turns = 1
            while True:
                begin, self._positions = len(self._items.all), []
                async with turn, aclosing(turn.grown()) as grown:
                    async for _, output in grown:
                        changes: list[Change] = []
                        for step in turn.take(output):
                            self._positions += step.delta.logprobs or ()
                            changes += self._items.take(step.events)
                            if step.finish_reason is not None:
                                changes += self._items.finish()
                                self._reason = step.finish_reason
                        yield changes
                self._usage += turn.usage
                calls = [item for item in self._items.all[begin:] if item.kind == "call"]
                own = [item for item in calls if self._kinds[item.index] == "mcp_call"]
                for item in own:
                    if self._reason != "length":
                        await self._call(item)
                    yield [Change("called", item)]
                num_turns += 1
                if not own or len(own) < len(calls) or not self._can_go_on():
                    return
                turn = await Turn.admit(self._next(num_turns), self._service)
        finally:
            await self._servers.close()

    def _can_go_on(self) -> bool:
        """Whether tokens are left for another turn."""
        most = self._head["max_output_tokens"]
        if self._reason != "length" and most is not None and self._usage.completion_tokens >= most:
            self._reason = "length"
        return self._reason != "length"

    def _next(self, num_turns: int) -> TurnRequest:
        """The request behind calls: to call on, or to answer where the limit of calls or turns is reached. The
        calls that the client required were made."""
        asked = self._ask([self._whole_item(item, is_cut=False) for item in self._items.all[len(self._first) :]])
        is_last = num_turns >= MAX_ROUNDS or (self.max_calls is not None and len(self._calls) >= self.max_calls)
        most = self._head["max_output_tokens"]
        left = None if most is None else most - self._usage.completion_tokens
        return replace(
            asked,
            tool_choice=ToolChoice("none" if is_last else "auto", None, asked.tool_choice.parallel),
            params=replace(asked.params, max_tokens=left),
        )

    async def _call(self, item: Item) -> None:
        """Make the call ``item``, unless there were as many as the client lets be made."""
        offered = self._servers.offered[item.name]
        if self.max_calls is not None and len(self._calls) >= self.max_calls:
            error = {"type": "mcp_protocol_error", "code": 0, "message": "not called: max_tool_calls is reached"}
            self._calls[item.index] = mcp_call(self._ids[item.index], offered.label, item.name, item.text, error=error)
            return
        result = await self._servers.call(offered.label, item.name, item.text)
        self._calls[item.index] = mcp_call(
            self._ids[item.index], offered.label, item.name, item.text, result.output, result.error
        )

    def failed(self, error: dict[str, Any]) -> bytes:
        """The event of a failure."""
        return error_event(error, self._number)

    def _response(self) -> dict[str, Any]:
        usage = self._usage
        is_cut = self._reason == "length"
        return self._head | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._whole_item(item, is_cut=is_cut) for item in self._items.all],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _note(self, change: Change) -> None:
        """Know an item that is new."""
        item = change.item
        if change.kind == "begin":
            kind = self._kind_of_call(item) if item.kind == "call" else _KINDS[item.kind]
            self._scored[item.index] = self._positions
            self._ids.append(_PREFIXES[kind] + uuid.uuid4().hex)
        elif change.kind == "whole":
            kind = item.value["type"]
            self._ids.append(item.value.setdefault("id", _PREFIXES[kind] + uuid.uuid4().hex))
        else:
            return
        self._kinds.append(kind)

    def _kind_of_call(self, item: Item) -> str:
        offered = self._servers.offered.get(item.name)
        if offered is None:
            return "function_call"
        return "mcp_approval_request" if offered.needs_approval else "mcp_call"

    def _event(self, kind: str, status: str = "in_progress") -> bytes:
        """An event before there is any output."""
        return self._named(kind, response=self.begun(status))

    def _last(self, whole: dict[str, Any]) -> bytes:
        return last_event(whole, self._number)

    def _written(self, change: Change) -> bytes:
        item = change.item
        kind = self._kinds[item.index]
        if change.kind == "whole":
            return self._written_whole(item)
        if kind == "mcp_approval_request":  # told of when it is complete
            return self._written_whole(item) if change.kind == "end" else b""
        if change.kind == "begin":
            return self._written_begin(item, kind)
        if change.kind == "more":
            return self._delta(item, kind, change.text)
        whole = self._whole_item(item, is_cut=False)
        at = self._at(item)
        if change.kind == "called":
            how = "failed" if whole["status"] == "failed" else "completed"
            return self._progress(item, "mcp_call", how) + self._done(item, whole)
        if item.kind == "call":
            del at["content_index"]
            named = {"name": item.name} if kind == "function_call" else {}
            ends = [self._named(f"response.{kind}_arguments.done", **at, **named, arguments=item.text)]
        elif item.kind == "reasoning":
            ends = [self._named("response.reasoning_text.done", **at, text=item.text)]
        else:
            part = whole["content"][0]
            ends = [
                self._named("response.output_text.done", **at, text=item.text, logprobs=part["logprobs"]),
                self._named("response.content_part.done", **at, part=part),
            ]
        if kind != "mcp_call":  # which ends once it was made
            ends.append(self._done(item, whole))
        return b"".join(ends)

    def _written_begin(self, item: Item, kind: str) -> bytes:
        added = self._added(item, self._item(item, [], status="in_progress", arguments=""))
        if kind == "mcp_call":
            return added + self._progress(item, kind, "in_progress")
        if item.kind != "text":
            return added
        return added + self._named("response.content_part.added", **self._at(item), part=_text_part("", []))

    def _written_whole(self, item: Item) -> bytes:
        """Something that is complete from the beginning."""
        whole = self._whole_item(item, is_cut=False)
        written = [self._added(item, whole)]
        if (kind := whole["type"]) in ("mcp_list_tools", "mcp_call"):
            how = "failed" if whole.get("error") else "completed"
            written += [self._progress(item, kind, each) for each in ("in_progress", how)]
        return b"".join([*written, self._done(item, whole)])

    def _added(self, item: Item, value: dict[str, Any]) -> bytes:
        return self._named("response.output_item.added", output_index=item.index, item=value)

    def _done(self, item: Item, value: dict[str, Any]) -> bytes:
        return self._named("response.output_item.done", output_index=item.index, item=value)

    def _progress(self, item: Item, kind: str, how: str) -> bytes:
        return self._named(f"response.{kind}.{how}", item_id=self._ids[item.index], output_index=item.index)

    def _delta(self, item: Item, item_type: str, text: str) -> bytes:
        """More of an item: most of all events, so written without building anything."""
        kind, tail = _DELTAS[item_type]
        number, self._number = self._number, self._number + 1
        return (
            f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},"item_id":"{self._ids[item.index]}",'
            f'"output_index":{item.index},"delta":{quoted(text)}{tail}}}\n\n'
        ).encode()

    def _named(self, kind: str, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": kind, "sequence_number": number} | values)

    def _at(self, item: Item) -> dict[str, Any]:
        return {"item_id": self._ids[item.index], "output_index": item.index, "content_index": 0}

    def _whole_item(self, item: Item, *, is_cut: bool) -> dict[str, Any]:
        if item.kind == "whole":
            return item.value
        if (called := self._calls.get(item.index)) is not None:
            return called
        is_last = is_cut and item is self._items.all[-1]
        scored: Sequence[Any] = ()
        if self.wants_logprobs and item.kind == "text":
            scored = chat_logprobs(self._scored[item.index], self.num_top, tokenizer_of(self._service))["content"]
        part = {"type": "reasoning_text", "text": item.text} if item.kind == "reasoning" else None
        content = [part or _text_part(item.text, scored)]
        return self._item(item, content, status="incomplete" if is_last else "completed", arguments=item.text)

    def _item(self, item: Item, content: list[Any], *, status: str, arguments: str) -> dict[str, Any]:
        own_id, kind = self._ids[item.index], self._kinds[item.index]
        head = {"id": own_id, "status": status}
        if kind == "function_call":
            named = {"call_id": item.call_id, "name": item.name, "arguments": arguments}
            return head | {"type": "function_call"} | named
        if kind == "mcp_call":
            return mcp_call(own_id, self._servers.offered[item.name].label, item.name, arguments, status=status)
        if kind == "mcp_approval_request":
            named = {"server_label": self._servers.offered[item.name].label, "name": item.name}
            return {"id": own_id, "type": kind, **named, "arguments": arguments}
        if item.kind == "reasoning":
            return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return head | {"type": "message", "role": "assistant", "content": content}


_DELTAS = {
    "message": ("response.output_text.delta", ',"content_index":0,"logprobs":[]'),
    "reasoning": ("response.reasoning_text.delta", ',"content_index":0'),
    "function_call": ("response.function_call_arguments.delta", ""),
    "mcp_call": ("response.mcp_call_arguments.delta", ""),
}
"""The name of an item's event for more of it, and what the event ends with."""


_KINDS = {"text": "message", "reasoning": "reasoning"}
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "mcp_call": "mcp_",
    "mcp_approval_request": "mcpr_",
    "mcp_list_tools": "mcpl_",
}
"""Prefixes of the ids of items."""


def _text_part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
