"""The engine's loop: batching, chunks, preemption, stops, cancellation, and what users see of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.engine.frontend.prompts import Prompt
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_plugin_api import ConfigError, ForwardStep, RequestError, StepLimits
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
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 8, "max_num_seqs": 3},
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
        pool = llm.core.scheduler.cache.pool
        assert pool.num_free == pool.num_usable, "pages leaked"
    assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_a_size_asked_for_is_taken_whole_and_keeps_prefixes(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4
    prompts = random_prompts(9, 32, seed=3, shortest=32)
    with small_llm(checkpoint[0], kv_cache_memory=100 * page_bytes, max_num_seqs=1, max_model_len=48) as llm:
        assert llm.core.executor.facts.num_pages == 100
        llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [16] * 9


def test_a_request_that_can_never_fit_is_refused_and_the_rest_is_dropped(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4
    with small_llm(checkpoint[0], kv_cache_memory=4 * page_bytes) as llm:
        assert llm.core.max_model_len == 48
        with pytest.raises(RequestError, match="maximum context length is 48"):
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


def test_the_first_token_of_a_prompt_of_one_token_is_drawn_as_asked(llm: LLM) -> None:
    """The step is like a decode, and the slot was another request's before."""
    for wanted in (7, 9):
        params = SamplingParams(temperature=0, max_tokens=3, logit_bias={wanted: 100.0}, logprobs=1)
        (output,) = llm.generate({"prompt_token_ids": [5]}, params, use_tqdm=False)
        assert output.outputs[0].token_ids == [wanted] * 3
        assert len(output.outputs[0].logprobs or ()) == 3


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
    pool = llm.core.scheduler.cache.pool
    assert pool.num_free == pool.num_usable


def test_text_prompts_and_the_forms_they_come_in(llm: LLM) -> None:
    one = llm.generate("abc", GREEDY)[0]
    assert one.prompt == "abc"
    assert one.prompt_token_ids == llm.tokenizer.encode("abc")
    forms: list[Prompt] = ["abc", {"prompt": "abc"}, {"prompt_token_ids": one.prompt_token_ids}]
    others = llm.generate(forms, GREEDY)
    assert [o.outputs[0].text for o in others] == [one.outputs[0].text] * 3
    with pytest.raises(RequestError, match=r"a prompt has no \['text'\]; known: prompt, prompt_token_ids, cache_salt"):
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


def test_a_common_prefix_is_read_once_and_changes_nothing(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    folder, model = checkpoint
    (common,) = random_prompts(1, 64, seed=9, shortest=64)
    prompts = [common + tail for tail in random_prompts(6, 20, seed=10)]
    with small_llm(folder, async_scheduling=True) as llm:
        llm.generate([common], GREEDY, use_tqdm=False)
        before = llm.stats.prefill_tokens
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.stats.prefill_tokens - before == sum(len(p) - 64 for p in prompts)
        salted = llm.generate([{"prompt_token_ids": prompts[0], "cache_salt": "tenant"}], GREEDY, use_tqdm=False)
        assert llm.stats.prefill_tokens - before == sum(len(p) - 64 for p in prompts) + len(prompts[0])
    assert salted[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_a_timeout_ends_requests_as_they_are(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=400, ignore_eos=True), timeout=0.02)
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", "deadline")
    assert len(output.outputs[0].token_ids) < 400
    assert not llm.core.has_unfinished


def test_priorities_decide_who_runs_first(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    with small_llm(checkpoint[0], max_num_seqs=1) as llm:
        outputs = llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False, priority=[2, 0, 1])
        ends = [output.metrics.finished or 0.0 for output in outputs]
        assert ends[1] < ends[2] < ends[0]
        with pytest.raises(RequestError, match="3 prompts, but 1 priority"):
            llm.generate([[1], [2], [3]], GREEDY, priority=[1])


def test_the_engines_seed_repeats_unseeded_requests(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    drawn = []
    for seed in (1, 1, 2):
        with small_llm(checkpoint[0], seed=seed) as llm:
            params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
            drawn.append([o.outputs[0].token_ids for o in llm.generate([[1], [1]], params, use_tqdm=False)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("failing", "times"), [("submit", 1), ("collect", 1), ("collect", 2)])
def test_a_step_that_fails_leaves_a_usable_engine(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, failing: str, times: int, ahead: bool
) -> None:
    """Interrupted twice, it does not even wait for the step that is on its way, where one is."""
    folder, model = checkpoint
    with small_llm(folder, async_scheduling=ahead, max_num_seqs=2) as llm:
        executor = llm.core.executor
        assert isinstance(executor, InProcessExecutor)
        runner = executor._runner
        assert runner is not None
        calls, real = iter(range(100)), getattr(runner, failing)

        def interrupted(argument: object) -> object:
            if 3 <= next(calls) < 3 + times:
                raise KeyboardInterrupt
            return real(argument)

        with monkeypatch.context() as patch:
            patch.setattr(runner, failing, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2], [3, 4], [5, 6]], GREEDY, use_tqdm=False)
        assert not llm.core.has_unfinished
        assert llm.core.scheduler.cache.pool.num_free == llm.core.scheduler.cache.pool.num_usable
        for prompt in ([1, 2], [7, 8, 9]):
            check_tokens_equal(model, prompt, llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_calls_that_overlap_share_the_engine(llm: LLM) -> None:
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0] for prompt in ([1, 2], [3, 4], [5, 6])]
    first, second = llm.stream([1, 2], GREEDY), llm.stream([3, 4], GREEDY)
    next(first), next(second), next(first)
    between = llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0]
    last = [list(stream)[-1].outputs[0] for stream in (second, first)]
    assert [last[1], last[0], between] == alone


def test_threads_share_the_engine(llm: LLM) -> None:
    prompts = random_prompts(12, 20, seed=12)
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: llm.generate([prompt], GREEDY, use_tqdm=False), prompts))
    assert [outputs[0].outputs[0].token_ids for outputs in together] == alone
    assert llm.core.scheduler.cache.pool.num_free == llm.core.scheduler.cache.pool.num_usable


def test_a_closed_llm_says_so(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    llm = small_llm(checkpoint[0])
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: next(llm.stream("a"))):
        with pytest.raises(RequestError, match="this LLM is closed; make a new one"):
            call()


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        [None],
        [1, "a"],
        [1.5],
        [True],
        b"abc",
        {"prompt": None},
        {"prompt": 3},
        {"prompt_token_ids": "ab"},
        {1, 2},
    ],
    ids=repr,
)
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"a prompt|texts"):
        llm.generate(prompt, GREEDY)
    assert not llm.core.has_unfinished


def test_one_bad_prompt_among_many_is_named(llm: LLM) -> None:
    prompts: list[Prompt] = ["a", {"prompt_token_ids": []}, "b"]
    with pytest.raises(RequestError, match=r"prompt 1: the prompt is empty"):
        llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match=r"sampling_params must be one SamplingParams"):
        llm.generate(["a"], {"temperature": 0})  # type: ignore[arg-type]  # the wrong kind on purpose
    assert not llm.core.has_unfinished


def test_a_platforms_step_limits_are_kept_and_change_no_token(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = StepLimits(
        max_tokens=100, max_requests=5, max_context=200, chunk_multiple=4, mixed_phases=False, token_buckets=(8, 24)
    )
    monkeypatch.setattr(CpuPlatform, "step_limits", lambda self: limits)
    folder, model = checkpoint
    prompts = random_prompts(8, 50, seed=13)
    sizes: set[int] = set()
    with small_llm(folder, async_scheduling=True) as llm:
        assert llm.core.max_model_len == 200
        real = llm.core.blueprint.model.hidden

        def hidden(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
            sizes.add(len(ids))
            return real(ids, step)

        monkeypatch.setattr(llm.core.blueprint.model, "hidden", hidden)
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
    assert sizes == {8, 24}, "steps are padded to the declared sizes, and to nothing else"
    with pytest.raises(ConfigError, match=r"--max-model-len 201: .* at most 200 tokens"):
        small_llm(folder, max_model_len=201)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 3\).* multiples of 4; set"):
        small_llm(folder, max_num_batched_tokens=3)
