"""Calls as DeepSeek-V3.2 writes them, in tags of its own.

``<｜DSML｜function_calls>``, then for each call ``<｜DSML｜invoke name="...">``, its arguments
``<｜DSML｜parameter name="..." string="true">value</｜DSML｜parameter>`` and ``</｜DSML｜invoke>``, and at last
``</｜DSML｜function_calls>``, with line breaks between all of them. Values are texts as they stand, or JSON where
``string`` is "false" (encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2).
"""

# ruff: noqa: RUF001  # the wide bars are the model's own

from __future__ import annotations

from typing import ClassVar

from hardpoint.parsers.calls import Call, as_json, function_name, json_string
from hardpoint.parsers.marked import Block, MarkedToolParser, Part
from hardpoint.parsers.steps import Literal, QuotedText, Short, Until
from hardpoint_plugin_api import ToolParserWorkload

_BEGIN, _END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
_CALL, _CALL_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_VALUE, _VALUE_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
_MARKS = (_BEGIN, _END, _CALL, _CALL_END, _VALUE, _VALUE_END)
_TEXT, _JSON = 'true">', 'false">'


class DsmlToolParser(MarkedToolParser):
    """Texts are passed on as they come, other values when they are whole."""

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = (_BEGIN,)

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The tag around calls, which a template may put together of its parts."""
        template = workload.chat_template or ""
        return "｜DSML｜" in template and "function_calls>" in template

    def block(self, opening: str) -> Block:
        mark = yield Literal(_CALL)
        while mark == _CALL:
            name = function_name((yield Short('">', forbidden=_MARKS)))
            if name is None:
                return False
            mark = yield Literal(_VALUE, _CALL_END)
            if mark == _CALL_END:
                yield [Call(name, "{}")]
            else:
                yield from _values(name)
            mark = yield Literal(_CALL, _END)
        return True


def _values(name: str) -> Block:
    """From behind the first value's mark to behind the call."""
    before, mark = "{", _VALUE
    begun: str | None = name
    while mark == _VALUE:
        key = yield Short('" string="', forbidden=_MARKS)
        kind = yield Literal(_TEXT, _JSON)
        before += f"{json_string(key)}: "
        if kind == _TEXT:
            yield Part(f'{before}"', begun)
            yield QuotedText(_VALUE_END)
            yield Part('"')
        else:
            value = as_json((yield Until(_VALUE_END)))
            yield Part(f"{before}{value}", begun)
        before, begun, mark = ", ", None, (yield Literal(_VALUE, _CALL_END))
    yield Part("}", is_last=True)
    return True
