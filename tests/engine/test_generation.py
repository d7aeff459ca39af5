"""The engine's loop: batching, chunks, preemption, stops, cancellation, and what users see of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.llm import Prompt
from hardpoint_plugin_api import RequestError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "qwen3")


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    with small_llm(checkpoint[0]) as engine:
        yield engine


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8},
        {"max_num_seqs": 3},
        {"block_size": 1},
        {"block_size": 64},
        {"attention_backend": "reference"},
        {"custom_ops": "none"},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_engine_is_set_up(
    checkpoint: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    folder, model = checkpoint
    prompts = random_prompts(8, 50, seed=4)
    with small_llm(folder, **settings) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_preempted_requests_give_the_same_tokens(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    folder, model = checkpoint
    prompts = random_prompts(8, 50, seed=5, shortest=30)
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4
    with small_llm(folder, kv_cache_memory=10 * page_bytes, max_model_len=96) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        pool = llm.core.scheduler.pool
        assert pool.num_free == pool.num_usable, "pages leaked"
    assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_a_request_that_can_never_fit_is_refused_and_the_rest_is_dropped(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4
    with small_llm(checkpoint[0], kv_cache_memory=4 * page_bytes) as llm:
        assert llm.core.max_model_len == 48
        with pytest.raises(RequestError, match="at most 47"):
            llm.generate([[1, 2, 3], [5] * 48], GREEDY)
        assert not llm.core.has_unfinished


def test_a_seeded_request_repeats_whatever_else_runs(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    other = SamplingParams(temperature=1.0, max_tokens=15, ignore_eos=True)
    alone = llm.generate([[1, 2, 3]], seeded, use_tqdm=False)[0].outputs[0].token_ids
    crowd = [[1, 2, 3], *random_prompts(9, 30, seed=6)]
    together = llm.generate(crowd, [seeded] + [other] * 9, use_tqdm=False)[0].outputs[0].token_ids
    assert together == alone
    unseeded = llm.generate([[1, 2, 3]] * 2, other, use_tqdm=False)
    assert unseeded[0].outputs[0].token_ids != unseeded[1].outputs[0].token_ids


def test_stops_by_token_text_and_length(llm: LLM) -> None:
    free = llm.generate([[10, 20, 30]], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (free.finish_reason, free.stop_reason, len(free.token_ids)) == ("length", None, 24)
    token = free.token_ids[5]
    first = free.token_ids.index(token)
    stopped = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[token], ignore_eos=True)
    by_token = llm.generate([[10, 20, 30]], stopped, use_tqdm=False)[0].outputs[0]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)
    assert by_token.token_ids == free.token_ids[: first + 1]
    text = free.text[3:5]
    by_text = llm.generate(
        [[10, 20, 30]], SamplingParams(temperature=0, max_tokens=24, stop=[text], ignore_eos=True), use_tqdm=False
    )[0].outputs[0]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", text)
    assert by_text.text == free.text[: free.text.index(text)]


def test_streaming_grows_to_the_same_text(llm: LLM) -> None:
    whole = llm.generate([[9, 8, 7]], GREEDY, use_tqdm=False)[0]
    seen = ""
    for output in llm.stream([9, 8, 7], GREEDY):
        assert output.outputs[0].text.startswith(seen)
        seen = output.outputs[0].text
    assert output.finished
    assert output.outputs[0] == whole.outputs[0]


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream([9, 8, 7], GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert not llm.core.has_unfinished
    pool = llm.core.scheduler.pool
    assert pool.num_free == pool.num_usable


def test_text_prompts_and_the_forms_they_come_in(llm: LLM) -> None:
    one = llm.generate("abc", GREEDY)[0]
    assert one.prompt == "abc"
    assert one.prompt_token_ids == llm.tokenizer.encode("abc")
    forms: list[Prompt] = ["abc", {"prompt": "abc"}, {"prompt_token_ids": one.prompt_token_ids}]
    others = llm.generate(forms, GREEDY)
    assert [o.outputs[0].text for o in others] == [one.outputs[0].text] * 3
    with pytest.raises(RequestError, match=r"needs 'prompt' or 'prompt_token_ids', got \['text'\]"):
        llm.generate([{"text": "abc"}])
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": -2}, "top_k must be"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": -1}, "seed must be"),
        ({"stop": [""]}, "stop must be texts that are not empty"),
    ],
)
def test_bad_sampling_parameters(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)
