"""An output as a sequence of items, one open at a time: how responses and Anthropic's messages see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from hardpoint_plugin_api import ContentDelta, ParserEvent, ReasoningDelta, ToolCallDelta, ToolCallStart


@dataclass
class Item:
    """A stretch of text or reasoning, or a call, whose ``text`` are its arguments; or something whole, made by the
    server: its ``value``. ``index`` counts from 0."""

    index: int
    kind: Literal["text", "reasoning", "call", "whole"]
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    value: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All of it, joined anew each time: parts come with every token."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Change:
    """An item begins, gets ``text``, or ends; a whole one is there; or a call has come to something."""

    kind: Literal["begin", "more", "end", "whole", "called"]
    item: Item
    text: str = ""


class Items:
    """The items of one output so far."""

    def __init__(self) -> None:
        self.all: list[Item] = []
        self._open: Item | None = None

    def take(self, events: Iterable[ParserEvent]) -> Iterator[Change]:
        """The changes that ``events`` make."""
        for event in events:
            if isinstance(event, ContentDelta):
                yield from self._more("text", event.text)
            elif isinstance(event, ReasoningDelta):
                yield from self._more("reasoning", event.text)
            elif isinstance(event, ToolCallStart):
                yield from self._begin(Item(len(self.all), "call", call_id=event.call_id, name=event.name))
            elif isinstance(event, ToolCallDelta):
                yield from self._more("call", event.arguments)

    def insert(self, value: dict[str, Any]) -> Iterator[Change]:
        """Add a whole item."""
        yield from self.finish()
        item = Item(len(self.all), "whole", value=value)
        self.all.append(item)
        yield Change("whole", item)

    def finish(self) -> Iterator[Change]:
        """The end of what is open."""
        if self._open is not None:
            closed, self._open = self._open, None
            yield Change("end", closed)

    def _more(self, kind: Literal["text", "reasoning", "call"], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Item(len(self.all), kind))
        assert self._open is not None
        self._open.parts.append(text)
        yield Change("more", self._open, text)

    def _begin(self, item: Item) -> Iterator[Change]:
        yield from self.finish()
        self.all.append(item)
        self._open = item
        yield Change("begin", item)
