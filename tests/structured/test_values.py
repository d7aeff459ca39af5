"""StructuredOutput as users write it, and SamplingParams with one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from hardpoint import SamplingParams
from hardpoint_plugin_api import RequestError, StructuredOutput


def test_it_is_plain_data() -> None:
    schema = StructuredOutput.json_schema({"type": "object", "properties": {"z": {}, "a": {}}})
    assert schema == StructuredOutput.json_schema('{"type": "object",  "properties": {"z": {}, "a": {}}}')
    assert schema.value.index('"z"') < schema.value.index('"a"')
    assert pickle.loads(pickle.dumps(schema)) == schema
    assert hash(schema) == hash(pickle.loads(pickle.dumps(schema)))
    assert StructuredOutput.json_schema(True).value == "true"


WRONG: dict[str, Any] = {
    "not JSON": lambda: StructuredOutput.json_schema("{"),
    "no object": lambda: StructuredOutput.json_schema("[]"),
    "NaN": lambda: StructuredOutput.json_schema({"minimum": float("nan")}),
    "not plain": lambda: StructuredOutput.json_schema({"const": object()}),
    "a list of choices": lambda: StructuredOutput.choice("yes"),
    "no trigger begins": lambda: StructuredOutput.structural_tag([{"begin": "<a>", "end": ""}], ["<b"]),
    "are texts, got": lambda: StructuredOutput.structural_tag([{"begin": "<a>"}], ["<a"]),
    "needs structures": lambda: StructuredOutput.structural_tag([], ["<a"]),
    "not empty": lambda: StructuredOutput.choice(["yes", ""]),
    "at least one": lambda: StructuredOutput.choice([]),
    "is empty": lambda: StructuredOutput.regex(""),
    "must be a text": lambda: StructuredOutput.regex(3),  # type: ignore[arg-type]
    "must be one of": lambda: StructuredOutput("yaml", "x"),  # type: ignore[arg-type]
    "give both": lambda: StructuredOutput("regex", "x", opening="<think>"),
    "a StructuredOutput": lambda: SamplingParams(structured={"type": "object"}),  # type: ignore[arg-type]
    "allowed_token_ids may forbid": lambda: SamplingParams(
        structured=StructuredOutput.json_object(), allowed_token_ids=[1]
    ),
    "bad_words may forbid": lambda: SamplingParams(structured=StructuredOutput.json_object(), bad_words=["x"]),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(make: Any) -> None:
    with pytest.raises(RequestError):
        make()
