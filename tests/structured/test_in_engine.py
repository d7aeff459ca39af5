"""Outputs of the demo model, which knows no JSON, are what was asked for: alone, mixed, preempted, elsewhere.

In float32 a request has the same tokens whatever becomes of it, as far as rounding goes.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

from hardpoint import LLM, AsyncEngine, SamplingParams
from hardpoint.checkpoint.source import demo_model
from hardpoint.conformance.families.parser_samples import tool
from hardpoint.engine.core import EngineCore
from hardpoint.engine.frontend.generation_config import GenerationConfig
from hardpoint.engine.outputs import FinishReason
from hardpoint.engine.requests import Delta
from hardpoint.engine.scheduling.request import Request
from hardpoint.engine.scheduling.scheduler import Scheduler
from hardpoint.parsers import choose_parsers
from hardpoint.structured import Grammars, StructureState, Trials, trials
from hardpoint_plugin_api import ParserArgs, RequestError, StructuredOutput
from tests.parsers.reading import joined

ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8}


class Place(BaseModel, extra="forbid"):
    """The object that the schema below describes."""

    size: int = Field(ge=3, le=20)
    tags: list[str] = Field(min_length=1, max_length=2)
    kind: str = Field(pattern="^(town|river)$")


PLACE = StructuredOutput.json_schema(
    {
        "type": "object",
        "properties": {
            "size": {"type": "integer", "minimum": 3, "maximum": 20},
            "tags": {
                "type": "array",
                "items": {"type": "string", "pattern": "^[a-z]{1,5}$"},
                "minItems": 1,
                "maxItems": 2,
            },
            "kind": {"enum": ["town", "river"]},
        },
        "required": ["size", "tags", "kind"],
        "additionalProperties": False,
    }
)
DATE = StructuredOutput.regex(r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]")
CHOICE = StructuredOutput.choice(["yes", "no", "it \"depends\" on \\ 'them' \x7f"])
GRAMMAR = StructuredOutput.grammar('start: item ("," item)*\nitem: /[a-c]/ | "(" item ")"')


def meets(structure: StructuredOutput, text: str) -> bool:
    """Say whether ``text`` is what ``structure`` describes, by other means than llguidance."""
    if structure is PLACE:
        return bool(Place.model_validate_json(text))
    if structure is DATE:
        return re.fullmatch(structure.value, text) is not None
    return structure is not CHOICE or text in structure.choices


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **ENGINE) as llm:
        yield llm


def texts(llm: LLM, params: list[SamplingParams], prompt: str = "She said") -> list[str]:
    """An output for each of ``params``, all of which ended by themselves where they are constrained."""
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    for each, output in zip(params, outputs, strict=True):
        assert each.structured is None or {out.finish_reason for out in output.outputs} == {"stop"}
    return [output.outputs[0].text for output in outputs]


MIXED = [SamplingParams(seed=1, structured=structured) for structured in (PLACE, DATE, CHOICE, None)]
MIXED += [SamplingParams(temperature=0, structured=PLACE)]


def check_mixed(llm: LLM) -> list[str]:
    params = [replace(each, max_tokens=160 if each.structured else 40) for each in MIXED]
    found = texts(llm, params)
    for each, text in zip(params, found, strict=True):
        assert each.structured is None or meets(each.structured, text), text
    return found


def test_mixed_with_others_and_the_same_everywhere(llm: LLM) -> None:
    """One after the other, in a batch, ahead of the device, and in another process: the same tokens."""
    found = check_mixed(llm)
    params = [replace(each, max_tokens=160 if each.structured else 40) for each in MIXED]
    assert [texts(llm, [each])[0] for each in params[:3]] == found[:3]
    with LLM("demo", async_scheduling=True, **ENGINE) as ahead:
        assert check_mixed(ahead) == found
    with LLM("demo", core_process=True, **ENGINE) as elsewhere:
        assert check_mixed(elsewhere) == found


def test_preempted_requests_go_on_where_they_were(llm: LLM) -> None:
    pattern = StructuredOutput.regex("([a-z]{1,3}-){40}")
    params = [SamplingParams(max_tokens=150, seed=seed, structured=pattern) for seed in range(5)]
    small_cache: dict[str, Any] = {"block_size": 16, "max_model_len": 256, **ENGINE}
    with LLM("demo", kv_cache_memory="2MiB", **small_cache) as probe:
        page = 2**21 // (probe.client.stats.num_pages + 1)
    with LLM("demo", kv_cache_memory=18 * page, **small_cache) as small:
        found = texts(small, params)
        assert small.stats.num_preemptions > 0
    assert found == texts(llm, params)
    assert all(re.fullmatch(pattern.value, text) for text in found)


def test_completions_differ_and_each_is_right(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=160, seed=5, structured=PLACE)
    outputs = llm.generate("She said", params, use_tqdm=False)[0].outputs
    assert len({out.text for out in outputs}) == 3
    for out in outputs:
        Place.model_validate_json(out.text)


def test_a_grammar_in_gbnf(llm: LLM) -> None:
    """The grammar of llama.cpp's own documentation, in short: moves of chess, numbered."""
    moves = StructuredOutput.grammar(
        'root ::= "1. " move " " move "\\n"\nmove ::= (pawn | nonpawn) [+#]?\n'
        'nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]\npawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?'
    )
    (text,) = texts(llm, [SamplingParams(max_tokens=60, seed=2, structured=moves)])
    piece = r"([NBKQR][a-h]?[1-8]?x?[a-h][1-8]|([a-h]x)?[a-h][1-8](=[NBKQR])?)[+#]?"
    assert re.fullmatch(rf"1\. {piece} {piece}\n", text)


@pytest.mark.parametrize("trigger", ["<call", "<|im_start|>"])
def test_structural_tags(llm: LLM, trigger: str) -> None:
    """A trigger, a text or a special token, is followed by one of its structures; the rest is free."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}},
        "required": ["n"],
    }
    schema["additionalProperties"] = False
    structures = [{"begin": f"{trigger}{name}>", "schema": schema, "end": "</call>"} for name in ("=a", "=b")]
    held = StructuredOutput.structural_tag(structures, [trigger])
    grammars = Grammars.of(llm.tokenizer, llm.client.facts.vocab_size)

    def follows(text: str) -> bool:
        state = grammars.start(held, frozenset({2}))
        for token in llm.tokenizer.encode(text, add_special_tokens=False):
            if not state.allowed[token // 8] >> token % 8 & 1:
                return False
            state.accept(token)
        return state.error is None

    assert follows(f'It is {trigger}=a>{{"n": 3}}</call>, and {trigger}=b>{{"n":12}}</call> so.')
    assert follows("a < b, and nothing is called")
    for wrong in (f"{trigger}=c>", f'{trigger}=a>{{"m"', f'{trigger}=b>{{"n": 3}}, '):
        assert not follows(f"It is {wrong}")
    if trigger in llm.tokenizer.added_tokens:  # a bias can have the demo model write it
        params = SamplingParams(max_tokens=60, temperature=0, structured=held, skip_special_tokens=False)
        biased = replace(params, logit_bias={llm.tokenizer.added_tokens[trigger]: 100.0})
        (output,) = llm.generate(["She said"], biased, use_tqdm=False)
        assert re.search(r'=[ab]>\{"n":-?\d+', output.outputs[0].text.replace(" ", "")), output.outputs[0].text


def test_every_token_was_allowed_and_the_end_only_at_the_end(llm: LLM) -> None:
    grammars = Grammars.of(llm.tokenizer, llm.client.facts.vocab_size)
    assert llm.tokenizer.eos_token_id is not None
    ends = GenerationConfig.read(demo_model()).eos_token_ids | {llm.tokenizer.eos_token_id}
    params = [SamplingParams(max_tokens=60, seed=seed, temperature=1.5, structured=GRAMMAR) for seed in range(4)]
    for output in llm.generate(["She said"] * 4, params, use_tqdm=False):
        out = output.outputs[0]
        state = grammars.start(GRAMMAR, ends)
        for index, token in enumerate(out.token_ids):
            allowed = np.unpackbits(np.frombuffer(state.allowed, np.uint8), bitorder="little")
            assert allowed[token]
            if token in ends:
                assert index == len(out.token_ids) - 1
            else:
                state.accept(token)
        assert out.finish_reason in ("stop", "length")
        if out.finish_reason == "stop":
            assert re.fullmatch(r"[abc()]+(,[abc()]+)*", out.text)


def test_an_end_that_is_ignored_or_comes_too_early(llm: LLM) -> None:
    choice = StructuredOutput.choice(["yes", "yesterday"])
    params = SamplingParams(temperature=0, ignore_eos=True, structured=choice)
    assert texts(llm, [params, replace(params, ignore_eos=False, min_tokens=9)]) == ["yesterday"] * 2


def test_special_tokens_are_no_text(llm: LLM) -> None:
    """A text in JSON may hold any character, but no token that is none."""
    tokenizer = llm.tokenizer
    state = Grammars.of(tokenizer, llm.client.facts.vocab_size).start(StructuredOutput.json_object(), frozenset())
    for token in tokenizer.encode('{"', add_special_tokens=False):
        state.accept(token)
    allowed = np.unpackbits(np.frombuffer(state.allowed, np.uint8), bitorder="little")
    assert allowed.sum() > 1000
    assert not allowed[list(tokenizer.special_ids)].any()


def test_reasoning_may_come_first(llm: LLM) -> None:
    """The demo model never writes these words by itself, so the free part is forced to end by a bias."""
    after = replace(CHOICE, after=".")
    dot = llm.tokenizer.encode(".", add_special_tokens=False)[0]
    params = SamplingParams(max_tokens=100, seed=1, structured=after, logit_bias={dot: 5.0})
    for text in texts(llm, [replace(params, seed=seed) for seed in range(3)]):
        _, dot_text, rest = text.partition(".")
        assert dot_text
        assert rest.lstrip(".\"' \n)") in CHOICE.choices or rest in CHOICE.choices, text
    unopened = replace(CHOICE, after=".", opening="<|im_start|>")
    params = replace(params, structured=unopened, logit_bias=None, temperature=0)
    assert texts(llm, [params])[0] in CHOICE.choices


def test_reasoning_ends_that_the_prompt_holds_do_not_end_the_outputs(llm: LLM) -> None:
    """As in gpt-oss's later turns, whose prompt holds the marks that ended the reasoning of the earlier ones."""
    end, start = "<|im_end|>", "<|im_start|>"
    after = replace(CHOICE, after=end)
    ends = llm.tokenizer.encode(end, add_special_tokens=False)
    params = SamplingParams(max_tokens=12, temperature=0, logit_bias=dict.fromkeys(ends, -100.0))
    earlier = f"{start}user\nHello{end}{start}assistant\nIt is thought.{end} She said"
    free = llm.generate([earlier], params, use_tqdm=False)[0].outputs[0].token_ids
    assert not set(ends) & set(free), "the output never gets to an end of its own"
    held = llm.generate([earlier], replace(params, structured=after), use_tqdm=False)[0].outputs[0].token_ids
    assert held == free, "nothing is constrained before the output's own end"
    whole = replace(params, structured=CHOICE, max_tokens=100, logit_bias=None)
    at_once = llm.generate([earlier], whole, use_tqdm=False)
    assert at_once[0].outputs[0].text in CHOICE.choices


BOUNDED = (tool("weather", city={"enum": ["Paris", "Rome"]}), tool("clock"))


@pytest.mark.parametrize("name_of_parser", ["hermes", "llama3_json", "mistral", "harmony"])
def test_forced_calls_are_read_by_their_parser(llm: LLM, name_of_parser: str) -> None:
    parsers = choose_parsers(llm.config.model_copy(update={"tool_parser": name_of_parser}))
    for name in ("weather", None):
        args = ParserArgs(tools=BOUNDED, special_tokens=llm.tokenizer.added_tokens)
        assert parsers.tool is not None
        structure = parsers.tool(args).constraint(name, parallel=False)
        assert structure is not None
        text = texts(llm, [SamplingParams(max_tokens=400, seed=3, temperature=0.7, structured=structure)])[0]
        parser = parsers.open(args)
        calls = [each for each in joined([*parser.feed(text), *parser.finish()]) if each[0] == "call"]
        assert len(calls) == 1, text
        assert calls[0][1] == (name or calls[0][1])
        assert set(json.loads(calls[0][2])) == ({"city"} if calls[0][1] == "weather" else set())


REFUSED = {
    "a type that is none": (StructuredOutput.json_schema({"type": "strng"}), "strng"),
    "nothing can satisfy": (StructuredOutput.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
    "a reference to nothing": (StructuredOutput.json_schema({"$ref": "#/$defs/x"}), "x"),
    "a reference elsewhere": (StructuredOutput.json_schema({"$ref": "http://127.0.0.1:9/x"}), "127.0.0.1"),
    "a pattern that is none": (StructuredOutput.regex("(a"), "unclosed group"),
    "look-ahead": (StructuredOutput.regex("(?=a)b"), "look-ahead"),
    "no text": (StructuredOutput.regex(r"[^\s\S]"), "no text"),
    "the empty text": (StructuredOutput.regex("a{0}"), "empty text"),
    "no GBNF": (StructuredOutput.grammar('root ::= ("a"'), "GBNF"),
    "an unknown rule": (StructuredOutput.grammar("start: foo"), "foo"),
    "too long": (StructuredOutput.regex("a" * 300_000), "300000 characters"),
    "no such token": (replace(DATE, after="x", opening="not a token"), "one token"),
    "for ever": (
        StructuredOutput.json_schema({"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(30)]}),
        "takes more than",  # seconds or memory, whichever this machine reaches first
    ),
    "nested too deeply": (
        StructuredOutput.grammar(
            "start: r0\n" + "".join(f'r{i}: r{i + 1} | "x"\n' for i in range(5000)) + 'r5000: "y"'
        ),
        "nested too deeply",
    ),
}


@pytest.mark.parametrize(("structure", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(
    llm: LLM, structure: StructuredOutput, words: str
) -> None:
    steps = llm.stats.num_steps
    with pytest.raises(RequestError, match="structured output: ") as error:
        llm.generate("x", SamplingParams(structured=structure))
    assert words in str(error.value)
    assert len(str(error.value)) < 500
    assert llm.stats.num_steps == steps


def test_a_dead_end_fails_the_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar can run out of its budget in the middle; the engine goes on."""
    ended = Scheduler._end_of_structure

    def fail(self: Scheduler, request: Any, structure: Any) -> FinishReason | None:
        structure.error = "out of fuel"
        return ended(self, request, structure)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_end_of_structure", fail)
        with pytest.raises(RequestError, match="no token can follow any more: out of fuel"):
            llm.generate("x", SamplingParams(structured=DATE), use_tqdm=False)
    assert meets(DATE, texts(llm, [SamplingParams(structured=DATE)])[0])


def test_a_dead_end_elsewhere_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Scheduler._end_of_structure

    def fail(self: Scheduler, request: Any, structure: Any) -> FinishReason | None:
        structure.error = "out of fuel" if structure.allowed and len(request.token_ids) % 2 else structure.error
        return ended(self, request, structure)

    async def run() -> None:
        async with AsyncEngine("demo", core_process=False) as engine:
            monkeypatch.setattr(Scheduler, "_end_of_structure", fail)
            params = SamplingParams(temperature=0, structured=DATE)
            with pytest.raises(RequestError, match="no token can follow any more: out of fuel"):
                [output async for output in await engine.submit("x", params)]
            monkeypatch.undo()
            outputs = [output async for output in await engine.submit("x", params)]
            assert meets(DATE, outputs[-1].outputs[0].text)

    asyncio.run(run())


def test_others_decode_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose grammar takes its time waits alone, and can be given up meanwhile."""
    start, may_go_on = Grammars.start, threading.Event()

    def slow(self: Grammars, structure: StructuredOutput, ends: frozenset[int] = frozenset()) -> StructureState:
        assert structure is not DATE or threading.current_thread().name == "hardpoint-preparations"
        if structure == DATE:
            assert may_go_on.wait(60)
        return start(self, structure, ends)

    async def run() -> None:
        monkeypatch.setattr(Grammars, "start", slow)
        async with AsyncEngine("demo", core_process=False) as engine:
            held = await engine.submit("x", SamplingParams(temperature=0, structured=DATE))
            given_up = await engine.submit("x", SamplingParams(temperature=0, structured=CHOICE))
            free = await engine.submit("x", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
            outputs = [output async for output in free]
            assert len(outputs[-1].outputs[0].token_ids) == 30
            assert not may_go_on.is_set()
            given_up.abort()
            assert [output async for output in given_up][-1].outputs[0].finish_reason == "abort"
            may_go_on.set()
            assert meets(DATE, [output async for output in held][-1].outputs[0].text)
            compiled = await engine.submit("x", SamplingParams(temperature=0, structured=DATE))
            assert meets(DATE, [output async for output in compiled][-1].outputs[0].text)

    asyncio.run(run())


def test_a_grammar_that_takes_too_much_memory_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered in the child alone, which then has room for small grammars."""
    names = [f"name_{i}" for i in range(3000)]
    large = StructuredOutput.json_schema({"type": "object", "properties": {n: {} for n in names}, "required": names})
    monkeypatch.setattr(trials, "PROGRAM", trials.PROGRAM.replace("serve()", f"serve(max_memory={2**21})"))
    tried = Trials(llm.tokenizer)
    try:
        with pytest.raises(RequestError, match="of memory to compile; make it simpler"):
            tried.check(large, llm.client.facts.vocab_size)
        tried.check(DATE, llm.client.facts.vocab_size)
    finally:
        tried.close()


def test_a_constraint_that_takes_too_much_memory_to_read_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has no room for its line: as with one that cannot be compiled, the next one gets another child."""
    monkeypatch.setattr(trials, "PROGRAM", trials.PROGRAM.replace("serve()", f"serve(max_memory={2**21})"))
    tried = Trials(llm.tokenizer)
    try:
        with pytest.raises(RequestError, match="of memory to compile; make it simpler"):
            tried.check(StructuredOutput("regex", "a" * 2**25), llm.client.facts.vocab_size)
        tried.check(DATE, llm.client.facts.vocab_size)
    finally:
        tried.close()


def test_an_allocation_that_fails_while_compiling_is_no_fault_of_the_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises MemoryError where the compiler would abort. The child answers both alike."""

    def fail(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr("hardpoint.structured.grammars._grammar", fail)
    with pytest.raises(MemoryError):
        Grammars.of(llm.tokenizer, llm.client.facts.vocab_size).start(DATE)


def test_compiled_grammars_are_kept_within_a_bound_of_bytes(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    bounded = Grammars(
        tokenizer.backend.to_str(), tokenizer.eos_token_id, llm.client.facts.vocab_size, cache_bytes=80 * 2**20
    )
    made = [StructuredOutput.regex(f"[a-z]{{{i}}}") for i in range(1, 6)]
    for structure in made:
        bounded.start(structure)
    assert [bounded.is_compiled(structure) for structure in made] == [False, False, True, True, True]
    long = StructuredOutput.choice(["x" * 2**17])
    bounded.start(long)
    assert [bounded.is_compiled(structure) for structure in (*made[-2:], long)] == [False, True, True]


def test_an_output_goes_on_from_the_tokens_it_has(llm: LLM) -> None:
    """Send a new engine the requests, as a front end does."""
    core = llm.client
    assert isinstance(core, EngineCore)
    params = SamplingParams(max_tokens=40, temperature=0, structured=DATE)
    prompt = llm.tokenizer.encode("She said")
    whole = core.add_request(prompt, params, frozenset({2}))
    while not whole.finish_reason:
        core.step()
    again = Request(core.admission.admit(prompt, params, frozenset({2})))
    again.take(Delta(again.number, tuple(whole.output_token_ids[:3]), None, None, 0, 0))
    core.queue(again)
    while not again.finish_reason:
        core.step()
    assert again.output_token_ids == whole.output_token_ids
