"""Calls as GLM-4.5 to 5.3 write them.

``<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n...</tool_call>``, with or without the line
breaks; texts stand as they are, other values as JSON (chat_template.jinja of zai-org/GLM-4.5; those of GLM-4.7 and
GLM-5 have no line breaks).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from hardpoint.parsers.calls import Call, as_json, json_string
from hardpoint.parsers.marked import Block, MarkedToolParser, Part
from hardpoint.parsers.steps import Literal, QuotedText, Short, Until
from hardpoint_plugin_api import ToolParserWorkload

_OPEN, _CLOSE, _KEY = "<tool_call>", "</tool_call>", "<arg_key>"
_NAME = re.compile(r"[^\s<>{}]+")


class GlmToolParser(MarkedToolParser):
    """Names and values between tags; which values are texts is the request's tools to say.

    Such texts are passed on as they come, other values when they are whole.
    """

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = (_OPEN,)

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The tags of keys."""
        template = workload.chat_template or ""
        return _OPEN in template and _KEY in template

    def block(self, opening: str) -> Block:
        head = Short(_KEY, _CLOSE, forbidden=[_OPEN])
        name = (yield head).strip()
        if not _NAME.fullmatch(name):
            return False
        if head.mark == _CLOSE:
            yield [Call(name, "{}")]
            return True
        types = self._types(name)
        before, mark = "{", _KEY
        while mark == _KEY:
            key = (yield Short("</arg_key>", forbidden=[_OPEN, _CLOSE])).strip()
            yield Literal("<arg_value>")
            before += f"{json_string(key)}: "
            begun = name if before[0] == "{" else None
            if _is_text(types.get(key)):
                yield Part(f'{before}"', begun)
                yield QuotedText("</arg_value>")
                yield Part('"')
            else:
                value = as_json((yield Until("</arg_value>")))
                yield Part(f"{before}{value}", begun)
            before, mark = ", ", (yield Literal(_KEY, _CLOSE))
        yield Part("}", is_last=True)
        return True

    def _types(self, name: str) -> Mapping[str, object]:
        """The schemas of a function's arguments, where the request's tools have them."""
        schema = self.args.functions.get(name, {}).get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"
