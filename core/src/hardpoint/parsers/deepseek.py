"""Calls as DeepSeek V3, R1 and V3.1 write them, between special tokens.

V3 and R1: ``<｜tool▁calls▁begin｜>``, then for each call
``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{...}\\n```<｜tool▁call▁end｜>``, and at last
``<｜tool▁calls▁end｜>`` (chat_template in tokenizer_config.json of deepseek-ai/DeepSeek-V3-0324). V3.1 has
``name<｜tool▁sep｜>{...}`` within the same marks (model card of deepseek-ai/DeepSeek-V3.1, "ToolCall").
"""

from __future__ import annotations

from typing import ClassVar

from hardpoint.parsers.marked import Block, MarkedToolParser, named_call
from hardpoint.parsers.steps import Literal, Short
from hardpoint_plugin_api import ToolParserWorkload

# ruff: disable[RUF001]  # the wide bars are the models' own
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# ruff: enable[RUF001]
_MARKS = (_BEGIN, _CALL, _SEP, _CALL_END, _END)
_FENCE = "```"


class DeepSeekToolParser(MarkedToolParser):
    """Both forms, told apart by what stands in front of the separator."""

    needs_special_tokens: ClassVar[bool] = True
    openings: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL)

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The mark of the first call."""
        return _BEGIN in (workload.chat_template or "")

    def block(self, opening: str) -> Block:
        if opening == _BEGIN:
            yield Literal(_CALL)
        while True:
            name = yield Short(_SEP, forbidden=[_BEGIN, _CALL, _CALL_END, _END])
            is_fenced = name.strip() == "function"
            if is_fenced:
                name = yield Short(f"{_FENCE}json", forbidden=_MARKS)
            if not (yield from named_call(name)):
                return False
            if is_fenced:
                yield Literal(_FENCE)
            yield Literal(_CALL_END)
            yield []
            if (yield Literal(_CALL, _END)) == _END:
                return True
