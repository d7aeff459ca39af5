"""Calls as Hermes 2 Pro and Qwen 2.5 and 3 write them.

``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, one after the other
(github.com/NousResearch/Hermes-Function-Calling, README; Qwen3's chat_template in its tokenizer_config.json).
"""

from __future__ import annotations

from typing import ClassVar

from hardpoint.parsers.lark import call_schema, functions_of, grammar, json_of, literal
from hardpoint.parsers.marked import Block, MarkedToolParser, object_call
from hardpoint.parsers.steps import Literal
from hardpoint_plugin_api import StructuredOutput, ToolParserWorkload

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser(MarkedToolParser):
    """JSON objects between tags; the last closing tag may be missing."""

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = (_OPEN,)

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The tag, with JSON in it: others write XML behind the same tag."""
        template = workload.chat_template or ""
        return _OPEN in template and "<arg_key>" not in template and "<function=" not in template

    def block(self, opening: str) -> Block:
        if not (yield from object_call()):
            return False
        yield Literal(_CLOSE)
        return True

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        return grammar(
            r'call ("\n" call)*' if parallel else "call",
            call=rf'{literal(self.args, _OPEN)} "\n" object "\n" {literal(self.args, _CLOSE)}',
            object=json_of(call_schema(functions_of(self.args, name))),
        )
