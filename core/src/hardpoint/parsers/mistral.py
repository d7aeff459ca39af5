"""Calls as Mistral's models write them, behind the special token ``[TOOL_CALLS]``.

Tokenizers before v11: an array, ``[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]``. Since v11 each
call has a mark of its own: ``[TOOL_CALLS]name[ARGS]{...}``, at first with ``[CALL_ID]id`` in front of ``[ARGS]``
(github.com/mistralai/mistral-common, tokens/tokenizers/instruct.py; chat templates of Mistral-Nemo and
Mistral-Small-3.2). Its chat templates take ids of nine letters and digits only.
"""

from __future__ import annotations

import re
import secrets
import string
from typing import ClassVar

from hardpoint.parsers.lark import call_schema, functions_of, grammar, json_of, literal, parameters, quoted
from hardpoint.parsers.marked import Block, MarkedToolParser, named_call, object_call
from hardpoint.parsers.steps import Literal, Look, Short
from hardpoint_plugin_api import StructuredOutput, ToolParserWorkload

_OPEN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"\s*[\w.-]+\s*")


class MistralToolParser(MarkedToolParser):
    """Both forms, told apart by what follows the mark."""

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = (_OPEN,)

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The mark."""
        return _OPEN in (workload.chat_template or "")

    def block(self, opening: str) -> Block:
        start = yield Look()
        if start == "[":
            yield Literal("[")
            while (yield from object_call()):
                if (yield Literal(",", "]")) == "]":
                    return True
            return False
        if start == "{":
            return (yield from object_call())
        head = Short(_ARGS, _ID, "{", forbidden=[_OPEN, "\n"], keep=True)
        name = yield head
        if not _NAME.fullmatch(name):
            return False
        if head.mark != "{":
            yield Literal(head.mark)
        if head.mark == _ID:
            yield Short(_ARGS, forbidden=[_OPEN, "{"])
        return (yield from named_call(name))

    def constraint(self, name: str | None = None, *, parallel: bool = True) -> StructuredOutput | None:
        functions, mark = functions_of(self.args, name), literal(self.args, _OPEN)
        if _ARGS not in self.args.special_tokens:
            items = {"type": "array", "items": call_schema(functions), "minItems": 1}
            return grammar(f"{mark} array", array=json_of(items if parallel else {**items, "maxItems": 1}))
        calls = [f"{quoted(each)} {literal(self.args, _ARGS)} arguments_{i}" for i, each in enumerate(functions)]
        rules = {f"arguments_{i}": json_of(parameters(each)) for i, each in enumerate(functions.values())}
        return grammar(f"({mark} call)+" if parallel else f"{mark} call", call=" | ".join(calls), **rules)

    def make_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
