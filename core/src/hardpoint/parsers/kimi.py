"""Calls as Kimi-K2 writes them, between special tokens.

A section begins with ``<|tool_calls_section_begin|>``. A call in it is ``<|tool_call_begin|>``, ``functions.name:0``,
``<|tool_call_argument_begin|>``, the arguments as JSON, ``<|tool_call_end|>``. ``<|tool_calls_section_end|>`` ends it
(docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct). ``functions.name:0`` is the call's id, which the chat
template repeats; its number counts the calls of a conversation.
"""

from __future__ import annotations

import re
from typing import ClassVar

from hardpoint.parsers.lark import functions_of, grammar, json_of, literal, parameters, quoted
from hardpoint.parsers.marked import Block, MarkedToolParser, named_call
from hardpoint.parsers.steps import Literal, Short
from hardpoint_plugin_api import ParserArgs, StructuredOutput, ToolParserWorkload

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"\s*(?:functions\.)?(?P<name>[\w.-]+):(?P<number>\d{1,9})\s*")


class KimiToolParser(MarkedToolParser):
    """A section of calls. The ids of calls are the model's own."""

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = (_BEGIN,)

    def __init__(self, args: ParserArgs) -> None:
        super().__init__(args)
        self._name, self._number, self._highest, self._ids = "", 0, -1, set[str]()

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The mark of a section."""
        return _BEGIN in (workload.chat_template or "")

    def block(self, opening: str) -> Block:
        yield Literal(_CALL)
        while True:
            found = _ID.fullmatch((yield Short(_ARGUMENTS, forbidden=[_BEGIN, _CALL, _CALL_END, _END])))
            if found is None:
                return False
            self._name, self._number = found["name"], int(found["number"])
            if not (yield from named_call(self._name)):
                return False
            yield Literal(_CALL_END)
            yield []
            if (yield Literal(_CALL, _END)) == _END:
                return True

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        functions = functions_of(self.args, name)
        begin, end, call, arguments, call_end = (
            literal(self.args, mark) for mark in (_BEGIN, _END, _CALL, _ARGUMENTS, _CALL_END)
        )
        calls = [f"{quoted(f'functions.{each}:')} NUMBER {arguments} arguments_{i}" for i, each in enumerate(functions)]
        rules = {f"arguments_{i}": json_of(parameters(each)) for i, each in enumerate(functions.values())}
        one = f"{call} call {call_end}"
        start = f"{begin} ({one})+ {end}" if parallel else f"{begin} {one} {end}"
        return grammar(start, call=" | ".join(calls), NUMBER="/[0-9]{1,4}/", **rules)

    def make_id(self) -> str:
        number = self._number
        if f"functions.{self._name}:{number}" in self._ids:  # a model that counts wrongly
            number = self._highest + 1
        self._highest = max(number, self._highest)
        made = f"functions.{self._name}:{number}"
        self._ids.add(made)
        return made
