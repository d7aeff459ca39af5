"""Effects of sampling parameters on outputs, against Transformers' logits and the parameters' definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.frontend.conversation import bad_word_sequences
from hardpoint.engine.outputs import PositionLogprobs
from hardpoint.engine.requests import AdmittedRequest
from hardpoint.engine.sampling_params import derived_seed
from hardpoint.engine.scheduling.request import Request
from hardpoint.structured.bytes import VOCABULARY
from hardpoint_plugin_api import RequestError
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint
from tests.support.engines import small_llm
from tests.support.sampling import changed_logits

PAGE_BYTES = 3 * 2 * 16 * 2 * 16 * 4
"""A page of 16 tokens of the test's model, over its three layers."""
END = 257
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4}


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 24, "ignore_eos": True} | settings))


def ids(text: str) -> list[int]:
    """Printable ASCII as the test's tokenizer of single bytes has it."""
    return [ord(letter) - ord("!") for letter in text]


def tokens_of(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> Any:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "qwen3")


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    with small_llm(checkpoint[0]) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(checkpoint: tuple[Path, PreTrainedModel]) -> PreTrainedModel:
    return checkpoint[1]


def check_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int], params: SamplingParams) -> None:
    """Assert that each token is the likeliest after the changes of ``params``, or ties with it."""
    words = tuple(tuple(ids(word)) for word in params.bad_words or ())
    stops = frozenset(params.stop_token_ids or ())
    sampling = Request(AdmittedRequest(0, tuple(prompt), params, 0, stops, 0, bad_words=words)).slot_sampling
    logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
    for position, (row, token) in enumerate(zip(logits.tolist(), tokens, strict=True)):
        changed = changed_logits(row, prompt, tokens[:position], sampling)
        margin = max(changed) - changed[token]
        assert margin < 2e-4, f"token {position} is {token}, expected {changed.index(max(changed))}: {margin:.2e}"


COMBINATIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.5},
    {"logit_bias": {5: 3.0, 6: -2.0, 200: 4.0}},
    {"allowed_token_ids": [3, 50, 51, 52, 120, 250]},
    {"stop_token_ids": list(range(0, 250, 2)), "min_tokens": 9},
    {
        **PENALTIES,
        "logit_bias": {9: 2.0, 10: -100.0},
        "allowed_token_ids": list(range(40)),
        "stop_token_ids": [9, 11],
        "min_tokens": 4,
    },
]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8}, {"async_scheduling": True}], ids=str)
def test_greedy_outputs_follow_the_definitions(
    checkpoint: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    """All combinations in one batch, each with a slot of its own."""
    folder, model = checkpoint
    prompts = random_prompts(len(COMBINATIONS), 40, seed=1, shortest=3)
    params = [greedy(**combination) for combination in COMBINATIONS]
    with small_llm(folder, **settings) as llm:
        for prompt, tokens, each in zip(prompts, tokens_of(llm, prompts, params), params, strict=True):
            check_greedy(model, prompt, tokens, each)


def test_penalties_change_something(llm: LLM) -> None:
    (prompt,) = random_prompts(1, 30, seed=2, shortest=30)
    plain, *others = tokens_of(
        llm, [prompt] * 9, [greedy(), *(greedy(**combination) for combination in COMBINATIONS[:8])]
    )
    assert all(tokens != plain for tokens in others)


def test_a_preempted_request_keeps_its_history(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    folder, model = checkpoint
    prompts = random_prompts(8, 50, seed=5, shortest=30)
    params = greedy(**PENALTIES, bad_words=["ab", "xyz"], logprobs=2, prompt_logprobs=1)
    with small_llm(folder, kv_cache_memory=10 * PAGE_BYTES, max_model_len=96) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_greedy(model, prompt, output.outputs[0].token_ids, params)
        check_logprobs(model, prompt, output.outputs[0].token_ids, output.outputs[0].logprobs, 2)
        assert output.prompt_logprobs is not None
        check_logprobs(model, prompt[:1], prompt[1:], output.prompt_logprobs[1:], 1)


def test_a_slot_forgets_its_last_request(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Two slots: what runs second in one of them is beside a request that keeps every part busy."""
    prompts = random_prompts(4, 20, seed=6)
    everything = {**PENALTIES, "logit_bias": {7: 50.0}, "bad_words": ["a", "bc"], "allowed_token_ids": list(range(20))}
    busy, short = greedy(max_tokens=60, **everything), greedy(max_tokens=3, prompt_logprobs=1, **everything)
    with small_llm(checkpoint[0], max_num_seqs=2) as llm:
        alone = llm.generate([prompts[3]], greedy(), use_tqdm=False)[0]
        together = llm.generate([*prompts], [busy, short, short, greedy()], use_tqdm=False)[3]
    assert not set(alone.outputs[0].token_ids) <= set(range(20))
    assert together.outputs == alone.outputs
    assert together.prompt_logprobs is None


# Bad words.


def test_bad_words_never_appear(llm: LLM, model: PreTrainedModel) -> None:
    (prompt,) = random_prompts(1, 20, seed=7, shortest=20)
    letters = ids("abcdef")
    text = llm.generate([prompt], greedy(allowed_token_ids=letters, max_tokens=40), use_tqdm=False)[0].outputs[0].text
    assert len(text) == 40
    words = [text[0], text[1:3], text[4:8], text[7:9]]
    params = greedy(allowed_token_ids=letters, max_tokens=40, bad_words=words)
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    assert not any(word in output.text for word in words)
    check_greedy(model, prompt, output.token_ids, params)


def test_only_the_output_completes_a_bad_word(llm: LLM) -> None:
    params = greedy(allowed_token_ids=ids("ab"), bad_words=["ab"], logit_bias={ids("b")[0]: 50.0})
    assert tokens_of(llm, [ids("aaa")], params)[0] == ids("b") * 24


def test_drawn_outputs_hold_no_bad_words(llm: LLM) -> None:
    words = [x + y for x in "abc" for y in "abc" if x != y] + ["aaa", "bbbb"]
    params = SamplingParams(
        temperature=5.0, seed=3, max_tokens=60, bad_words=words, allowed_token_ids=ids("abc-"), ignore_eos=True
    )
    text = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].text
    assert not any(word in text for word in words)
    assert {"a", "b", "c"} <= set(text)


def test_bad_words_are_tokenized_as_they_stand_in_a_text(llm: LLM) -> None:
    assert bad_word_sequences(llm.tokenizer, ["ab", " c", "\n"]) == [
        llm.tokenizer.encode(text) for text in ("ab", "c", "\n")
    ], "a space of its own before a word changes nothing"


class _Words:
    """A tokenizer for which a word behind a space is another token."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return {"ham": [1], " ham": [2], "spam": [3, 1], " spam": [4, 1]}[text]


def test_a_word_behind_a_space_is_another_token() -> None:
    tokenizer: Any = _Words()
    assert bad_word_sequences(tokenizer, ["ham", " spam"]) == [[1], [2], [3, 1], [4, 1]]


@pytest.mark.parametrize(
    "contradiction",
    [
        {"allowed_token_ids": ids("ab"), "bad_words": ["a", "b"]},
        {"allowed_token_ids": [END], "min_tokens": 1, "ignore_eos": False},
        {"allowed_token_ids": ids("ab"), "stop_token_ids": ids("a"), "bad_words": ["b"], "min_tokens": 2},
    ],
)
def test_parameters_that_exclude_every_token_are_refused(llm: LLM, contradiction: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="every one of allowed_token_ids is excluded"):
        llm.generate([[1, 2]], SamplingParams(**contradiction), use_tqdm=False)


# Ends.


def test_nothing_ends_before_min_tokens(llm: LLM) -> None:
    free = llm.generate([[10, 20, 30]], greedy(max_tokens=40), use_tqdm=False)[0].outputs[0]
    stops = sorted(set(free.token_ids))
    for least in (1, 6):
        params = greedy(stop_token_ids=stops, min_tokens=least, max_tokens=60)
        output = llm.generate([[10, 20, 30]], params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) >= least
        assert not set(output.token_ids[:least]) & set(stops)
        assert output.token_ids[-1] in stops or output.finish_reason == "length"


def test_the_models_own_end_waits_too(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=7, logit_bias={END: 1000.0})
    output = llm.generate([[4, 5]], params, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (8, "stop", None)


def test_an_end_outside_the_vocabulary_is_no_reason_to_fail(llm: LLM) -> None:
    request = llm.core.add_request(
        [4, 5], greedy(min_tokens=2, max_tokens=3, ignore_eos=False), frozenset({END, VOCABULARY + 10})
    )
    while llm.core.has_unfinished:
        llm.core.step()
    assert len(request.output_token_ids) == 3


def test_stop_texts_count_from_min_tokens_on(llm: LLM) -> None:
    params: dict[str, Any] = {"allowed_token_ids": ids("a"), "stop": ["a"], "max_tokens": 9}
    outputs = [
        llm.generate([[1]], greedy(**params, min_tokens=least), use_tqdm=False)[0].outputs[0] for least in (0, 5)
    ]
    assert [(output.text, len(output.token_ids)) for output in outputs] == [("", 1), ("aaaaa", 6)]


# Log-probabilities.


def check_logprobs(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    entries: Sequence[PositionLogprobs | None] | None,
    top_n: int,
) -> None:
    """Assert that ``entries`` are those of ``tokens`` behind ``prompt``, by Transformers' logits."""
    expected = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    assert entries is not None
    for row, token, entry in zip(expected, tokens, entries, strict=True):
        assert entry is not None
        assert next(iter(entry)) == token, "the token itself comes first"
        assert len(entry) in (top_n, top_n + 1)
        for other, logprob in entry.items():
            assert abs(logprob.logprob - float(row[other])) < 1e-4
            likelier = int((row > row[other]).sum())
            close = int(((row - row[other]).abs() < 2e-4).sum())
            assert likelier - close < logprob.rank <= likelier + close
        assert sorted(e.rank for e in entry.values())[:top_n] == list(range(1, top_n + 1))


@pytest.mark.parametrize("chunk", [8, 512])
def test_logprobs_are_transformers_own(checkpoint: tuple[Path, PreTrainedModel], chunk: int) -> None:
    """Raw ones, whatever changes the draw, beside requests that ask for others or for none."""
    folder, model = checkpoint
    prompts = random_prompts(6, 50, seed=9)
    asked: list[dict[str, Any]] = [{"logprobs": 3, "prompt_logprobs": 0}, {"logprobs": 0, "prompt_logprobs": 5}, {}]
    with small_llm(folder, max_num_batched_tokens=chunk) as llm:
        params = [greedy(**PENALTIES, **asked[i % 3]) for i in range(6)]
        outputs = llm.generate([*prompts], params, use_tqdm=False)
    for prompt, output, own in zip(prompts, outputs, params, strict=True):
        completion = output.outputs[0]
        if own.logprobs is None or own.prompt_logprobs is None:
            assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
            continue
        check_logprobs(model, prompt, completion.token_ids, completion.logprobs, own.logprobs)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        check_logprobs(model, prompt[:1], prompt[1:], output.prompt_logprobs[1:], own.prompt_logprobs)
        assert completion.logprobs is not None
        drawn = (entry[token] for entry, token in zip(completion.logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in drawn))


def test_prompt_logprobs_do_not_depend_on_chunks_or_on_what_is_cached(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    (prompt,) = random_prompts(1, 60, seed=10, shortest=60)
    params = greedy(max_tokens=2, prompt_logprobs=4)
    found = []
    for chunk in (8, 512):
        with small_llm(checkpoint[0], max_num_batched_tokens=chunk, enable_prefix_caching=True) as llm:
            for _ in range(2):
                entries = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
                assert entries is not None
                found.append([None if e is None else {t: (x.rank, x.logprob) for t, x in e.items()} for e in entries])
    for other in found[1:]:
        for a, b in zip(found[0][1:], other[1:], strict=True):
            assert a is not None
            assert b is not None
            assert list(a) == list(b)
            assert all(a[t][0] == b[t][0] and abs(a[t][1] - b[t][1]) < 1e-5 for t in a)


def test_logprobs_of_all_tokens_sum_to_one(llm: LLM) -> None:
    output = llm.generate([[7, 8]], greedy(max_tokens=2, logprobs=-1), use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    for entry in output.logprobs:
        assert len(entry) == VOCABULARY
        assert sum(math.exp(x.logprob) for x in entry.values()) == pytest.approx(1, abs=1e-5)
    assert output.logprobs[0][ids("a")[0]].decoded_token == "a"
    assert output.logprobs[0][END].decoded_token == "</s>"


def test_logprobs_grow_with_a_stream(llm: LLM) -> None:
    for number, output in enumerate(llm.stream([9, 8, 7], greedy(max_tokens=5, logprobs=1, prompt_logprobs=1)), 1):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == number
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 3


# Several completions, and seeds.


def test_n_completions_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    first, again = (llm.generate([[1, 2, 3]] * 2, params, use_tqdm=False) for _ in range(2))
    for output in first + again:
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
        assert output.outputs == first[0].outputs
        assert output.finished
        assert output.prompt_logprobs is not None
    single = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
    assert tokens_of(llm, [[1, 2, 3]], single)[0] == first[0].outputs[0].token_ids
    unseeded = llm.generate([[1, 2, 3]], SamplingParams(n=3, max_tokens=16, ignore_eos=True), use_tqdm=False)[0]
    assert len({tuple(completion.token_ids) for completion in unseeded.outputs}) == 3


def test_completions_end_one_by_one_in_a_stream(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=2.0, seed=5, max_tokens=30, stop_token_ids=list(range(0, 250, 8)))
    lengths = [0, 0, 0]
    for output in llm.stream([3, 4], params):
        grown = [len(completion.token_ids) for completion in output.outputs]
        assert sum(grown) > sum(lengths)
        lengths = grown
        assert output.finished == all(completion.finished() for completion in output.outputs)
    assert output.finished
    assert len(set(lengths)) > 1, "they are meant to end at different times"
    assert not llm.core.has_unfinished


def test_derived_seeds_do_not_overlap() -> None:
    seeds = {derived_seed(seed, index) for seed in range(100) for index in range(20)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(7, 0) == 7


def test_a_seeded_request_repeats_whatever_its_neighbours_ask_for(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True)
    penalised = SamplingParams(temperature=1.0, top_k=50, seed=8, max_tokens=20, ignore_eos=True, **PENALTIES)
    alone = [tokens_of(llm, [[1, 2, 3]], params)[0] for params in (seeded, penalised)]
    others = [
        SamplingParams(max_tokens=15, logit_bias={4: 5.0}, logprobs=5, **PENALTIES),
        SamplingParams(max_tokens=15, bad_words=["a", "bcd"], min_tokens=5, prompt_logprobs=2, min_p=0.1),
        SamplingParams(max_tokens=15, allowed_token_ids=[1, 2, 3], temperature=0),
        SamplingParams(max_tokens=15),
    ]
    crowd = [[1, 2, 3], *random_prompts(8, 30, seed=6), [1, 2, 3]]
    together = tokens_of(llm, crowd, [seeded, *others * 2, penalised])
    assert [together[0], together[-1]] == alone


# Values that are refused.

BAD: list[tuple[str, Any]] = [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in (-0.1, math.nan, "1", None, True)),
    *((name, math.inf) for name in ("temperature", "repetition_penalty", "presence_penalty")),
    *(("repetition_penalty", value) for value in (0, -1.0, math.nan, "1.1")),
    *((f"{name}_penalty", value) for name in ("presence", "frequency") for value in (-2.1, 2.1, math.nan, "0")),
    *(("logit_bias", value) for value in ({1: math.nan}, {1: math.inf}, {1: "2"}, {"1": 2.0}, {-1: 1.0}, [1, 2], 3)),
    *(("allowed_token_ids", value) for value in ([], [1.5], ["1"], [-1], 3, "12")),
    *(("stop_token_ids", value) for value in ([-1], ["a"], 3, "12", [True])),
    *(("bad_words", value) for value in ("word", [""], ["  "], [1], 5)),
    *(("stop", value) for value in ("", [""], [1], 5)),
    *(("min_tokens", value) for value in (-1, 1.5, "3", None, 17)),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 1.5, "3", math.nan, True)),
    *(("n", value) for value in (0, -1, 1.5, "2", None)),
    *(("max_tokens", value) for value in (0, 2.5, "8")),
    *(("top_k", value) for value in (-2, 1.5, "8", 2**31)),
    *(("seed", value) for value in (-1, 2**63, 1.5, "8")),
    *((name, 1) for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias names token 258, outside the model's vocabulary of 258"),
        ({"allowed_token_ids": [1, 999]}, "allowed_token_ids names token 999"),
        ({"stop_token_ids": [1000]}, "stop_token_ids names token 1000"),
        ({"logprobs": VOCABULARY + 1}, "logprobs must be at most the model's vocabulary of 258, got 259"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs must be at most"),
        ({"bad_words": ["\ud800"]}, "lone surrogate"),
    ],
    ids=str,
)
def test_what_the_vocabulary_does_not_hold_is_refused_by_name(llm: LLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2, 3]] * 2, SamplingParams(**settings), use_tqdm=False)
    assert not llm.core.has_unfinished


def test_a_tokenizer_larger_than_the_model_is_told_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="bad_words names token 300"):
        llm.core.add_request([1], greedy(), frozenset(), bad_words=[[1, 300]])


def test_numbers_of_other_libraries_are_numbers(llm: LLM) -> None:
    params = greedy(max_tokens=np.int64(3), presence_penalty=np.float32(0.5), logit_bias={np.int64(4): np.float64(1.0)})
    assert len(tokens_of(llm, [[1, 2]], params)[0]) == 3


def test_masked_tokens_stay_masked_at_the_ends_of_ranges(llm: LLM) -> None:
    """Where float32 would overflow, or make NaN of what is forbidden."""
    allowed = [64, 65, 5, 6]
    for extreme in (
        {"repetition_penalty": 1e-3, "temperature": 1.0},
        {"repetition_penalty": 1e3},
        {"temperature": 1e-40},
        {"logit_bias": {64: 1e6, 7: 1e6}, "temperature": 0.5},
        {"logit_bias": {64: -1e6}, "repetition_penalty": 3.0},
    ):
        (found,) = tokens_of(llm, [[1, 2, 3]], greedy(allowed_token_ids=allowed, **extreme))
        assert set(found) <= set(allowed), extreme
    assert greedy(temperature=1e-6).is_greedy


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1e-60},
        {"repetition_penalty": 3e38},
        {"logit_bias": {1: 3e38}},
        {"stop_token_ids": np.array([1, 2])},
        {"allowed_token_ids": np.array([1, 2])},
    ],
    ids=str,
)
def test_numbers_beyond_the_ranges(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(settings))} must be"):
        greedy(**settings)


def test_a_salt_that_cannot_be_hashed_is_its_own_requests_error(llm: LLM) -> None:
    prompts: Any = [{"prompt_token_ids": [1, 2], "cache_salt": "\ud800"}]
    with pytest.raises(RequestError, match=r"cache_salt must be a text that UTF-8 can hold, got '\\ud800'"):
        llm.generate(prompts, greedy())
    assert len(tokens_of(llm, [[1, 2]], greedy())[0]) == 24


def test_an_interrupt_leaves_no_completion_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core, real, calls = llm.client, llm.client.add_request, list[int]()

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], greedy(n=4, temperature=1.0))
    assert core.stats.num_waiting == core.stats.num_running == 0
    assert len(tokens_of(llm, [[1, 2]], greedy())[0]) == 24
