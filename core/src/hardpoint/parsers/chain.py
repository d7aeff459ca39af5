"""An output's way through its parsers: reasoning first, calls in what is left."""

from __future__ import annotations

from hardpoint_plugin_api import ContentDelta, ParserEvent, ReasoningDelta, ReasoningParser, ToolParser


class OutputParser:
    """Both parsers of one output as one; without either, text is content."""

    def __init__(self, reasoning: ReasoningParser | None, tool: ToolParser | None) -> None:
        self._reasoning, self._tool = reasoning, tool
        self.is_reasoning: bool | None = None
        """Whether what came last is reasoning; None as long as nothing has come, and without a reasoning parser."""

    @property
    def tells_reasoning(self) -> bool:
        """True where reasoning is told from the answer."""
        return self._reasoning is not None

    def feed(self, delta: str) -> list[ParserEvent]:
        """Take more text; return what is certain now."""
        if not delta:
            return []
        if self._reasoning is None:
            return self._through_tool([ContentDelta(delta)])
        events = self._reasoning.feed(delta)
        if events:
            self.is_reasoning = isinstance(events[-1], ReasoningDelta)
        return self._through_tool(events)

    def finish(self) -> list[ParserEvent]:
        """The output has ended: return everything held back."""
        events = self._through_tool(self._reasoning.finish()) if self._reasoning else []
        return events + (self._tool.finish() if self._tool else [])

    def _through_tool(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._tool is None:
            return events
        read: list[ParserEvent] = []
        for event in events:
            read += self._tool.feed(event.text) if isinstance(event, ContentDelta) else [event]
        return read
