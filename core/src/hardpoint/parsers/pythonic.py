"""Calls written as a Python list: ``[weather(city="Paris", days=2), time()]``.

The whole output of Llama 3.2 and 4 where they are asked to write so (github.com/meta-llama/llama-models,
models/llama4/prompt_format.md, "Zero shot function calling"). Read as data by Python's own parser, never evaluated.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any, ClassVar

from hardpoint.parsers.calls import json_string, json_text
from hardpoint.parsers.marked import Block, MarkedToolParser, Part
from hardpoint.parsers.steps import Brackets, Literal, Look, Short
from hardpoint_plugin_api import ToolParserWorkload

_WORDS = {"true": True, "false": False, "null": None}
_MAX_CHARACTERS = 2**17


class PythonicToolParser(MarkedToolParser):
    """A list of calls at the output's beginning, each of a tool of the request, with keywords and plain values.

    Each keyword is passed on when its value is whole.
    """

    openings: ClassVar[tuple[str, ...]] = ("<|python_start|>",)
    bare: ClassVar[str] = "["

    @classmethod
    def recognizes(cls, workload: ToolParserWorkload) -> bool:
        """The example that Llama 4's template gives of such a list, and none of JSON."""
        template = workload.chat_template or ""
        return "[func_name1(" in template and '"parameters"' not in template

    def block(self, opening: str) -> Block:
        yield Literal("[")
        while True:
            name = (yield Short("(", forbidden=list("])[{}'\"\n,"), limit=128)).strip()
            if name not in self.args.functions:
                return False
            before, end = "{", ","
            while end == ",":
                written = yield Brackets(opened="(", quotes="\"'", separator=",")
                argument, end = written[:-1], written[-1]
                if end == ")" and not argument.strip():
                    break
                member = _member(argument)
                if member is None:
                    return False
                yield Part(before + member, name if before == "{" else None)
                before = ", "
            yield Part("{}", name, is_last=True) if before == "{" else Part("}", is_last=True)
            if (yield Literal(",", "]")) == "]":
                break
            if (yield Look()) == "]":
                yield Literal("]")
                break
        yield []
        if opening:
            yield Literal("<|python_end|>")
        return True


def _member(written: str) -> str | None:
    """``days=2`` as ``"days": 2``; None for what is no keyword with a plain value."""
    if len(written) > _MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            call = ast.parse(f"f({written})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or len(call.keywords) != 1:
            return None
        (keyword,) = call.keywords
        if keyword.arg is None:
            return None
        return f"{json_string(keyword.arg)}: {json_text(_value(keyword.value))}"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    raise ValueError(f"no plain value: {type(node).__name__}")
