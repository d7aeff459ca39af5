"""Calls as Llama 3.1 to 3.3 write them.

``{"name": ..., "parameters": {...}}`` as the whole output, perhaps behind ``<|python_tag|>``; several are separated by
``;`` (github.com/meta-llama/llama-models, models/llama3_1/prompt_format.md, "JSON based tool calling"). Calls of
built-in tools, which are Python behind the tag, are content.
"""

from __future__ import annotations

from typing import ClassVar

from hardpoint.parsers.lark import call_schema, functions_of
from hardpoint.parsers.marked import Block, MarkedToolParser, object_call
from hardpoint.parsers.steps import Literal
from hardpoint_plugin_api import StructuredOutput, ToolParserWorkload


class Llama3ToolParser(MarkedToolParser):
    """JSON objects. Without the tag, one is a call only if it names a tool of the request."""

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    bare: ClassVar[str] = "{"

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """Llama 3's headers, and the key that its calls have."""
        template = workload.chat_template or ""
        return "<|start_header_id|>" in template and '"parameters"' in template

    def block(self, opening: str) -> Block:
        known = self.args.functions
        while True:
            if not (yield from object_call(lambda name: bool(opening) or name in known)):
                return False
            yield Literal(";")

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        return StructuredOutput.json_schema(call_schema(functions_of(self.args, name), "parameters"))
