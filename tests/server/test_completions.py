"""``/v1/completions`` through OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from hardpoint import LLM, SamplingParams
from tests.support.engines import until
from tests.support.serving import RunningServer

PROMPT = "The whale"


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", platform="cpu", kv_cache_memory="16MiB", plugin_config={"cpu": {"threads": 1}}) as llm:
        yield llm


def text_of(llm: LLM, prompt: Any, **params: Any) -> str:
    (output,) = llm.generate(
        [prompt], SamplingParams(**{"temperature": 0.0, "max_tokens": 16} | params), use_tqdm=False
    )
    return output.outputs[0].text


def test_the_text_is_that_of_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=12)
    choice = answer.choices[0]
    assert choice.text == text_of(llm, PROMPT, max_tokens=12)
    assert (choice.index, choice.finish_reason, answer.object, answer.model) == (0, "length", "text_completion", "demo")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI, llm: LLM) -> None:
    stream = client.completions.create(
        model="demo",
        prompt=PROMPT,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == text_of(llm, PROMPT, max_tokens=12)
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_completions_are_numbered(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    prompts: Any = [PROMPT, "My dear Watson,"]
    params: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 8, "n": 2}
    wanted = [
        o.text for output in llm.generate(prompts, SamplingParams(**params), use_tqdm=False) for o in output.outputs
    ]
    if stream:
        found = [""] * 4
        for chunk in client.completions.create(model="demo", prompt=prompts, stream=True, **params):
            for choice in chunk.choices:
                found[choice.index] += choice.text
    else:
        answer = client.completions.create(model="demo", prompt=prompts, **params)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        found = [choice.text for choice in answer.choices]
    assert found == wanted


def test_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    for prompt in (ids, [ids, ids]):
        answer = client.completions.create(
            model="demo", prompt=prompt, temperature=0, max_tokens=5, extra_body={"return_token_ids": True}
        )
        for choice in answer.choices:
            assert choice.text == text_of(llm, PROMPT, max_tokens=5)
            extra = choice.model_extra or {}
            assert extra["prompt_token_ids"] == ids
            assert llm.tokenizer.decode(extra["token_ids"]) == choice.text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_echo(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "logprobs": 2, "echo": True}
    (wanted,) = llm.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2), use_tqdm=False
    )
    if stream:
        choices = [
            c
            for chunk in client.completions.create(model="demo", prompt=PROMPT, stream=True, **params)
            for c in chunk.choices
        ]
    else:
        choices = client.completions.create(model="demo", prompt=PROMPT, **params).choices
    assert "".join(choice.text for choice in choices) == PROMPT + wanted.outputs[0].text
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens or ()]
    scores = [score for part in parts for score in part.token_logprobs or ()]
    offsets = [offset for part in parts for offset in part.text_offset or ()]
    assert wanted.prompt_logprobs is not None
    assert wanted.outputs[0].logprobs is not None
    drawn = [next(iter(p.values())) for p in [*wanted.prompt_logprobs[1:], *wanted.outputs[0].logprobs] if p]
    assert tokens[1:] == [each.decoded_token for each in drawn]
    assert scores[0] is None
    assert scores[1:] == pytest.approx([each.logprob for each in drawn])
    assert len(offsets) == len(tokens)
    tops = [top for part in parts for top in part.top_logprobs or ()]
    assert all(token in top and len(top) <= 3 for token, top in zip(tokens, tops, strict=True) if top)


def test_fields_of_vllm(client: openai.OpenAI, server: RunningServer) -> None:
    def complete(stream: bool = False, prompt: str = PROMPT, **fields: Any) -> Any:
        return client.completions.create(
            model="demo", prompt=prompt, temperature=0, max_tokens=20, stream=stream, extra_body=fields
        )

    assert complete(guided_choice=["whale", "boat"]).choices[0].text in ("whale", "boat")
    tag = {"format": {"type": "plus", "content": {"type": "const_string", "value": "ab"}}}
    assert complete(structured_outputs={"structural_tag": tag}).choices[0].text.replace("ab", "") in ("", "a")
    assert complete(structured_outputs={"regex": "[ab]{3}", "backend": "x"}).choices[0].text.strip("ab") == ""
    with pytest.raises(openai.BadRequestError, match="give one"):
        complete(guided_regex="a", guided_json={})
    short = complete(truncate_prompt_tokens=2, prompt=PROMPT * 2000)
    assert short.usage.prompt_tokens == 2
    whole = complete(return_token_ids=True).choices[0].prompt_token_ids
    for side, kept in (("left", whole[-2:]), ("right", whole[:2])):
        cut = complete(truncate_prompt_tokens=2, truncation_side=side, return_token_ids=True)
        assert cut.choices[0].prompt_token_ids == kept
    assert complete(add_special_tokens=False).choices[0].text == complete().choices[0].text  # the demo model has none
    assert complete(request_id="mine").id == "cmpl-mine"
    scored = complete(return_tokens_as_token_ids=True, logprobs=1, return_token_ids=True).choices[0]
    assert scored.logprobs.tokens == [f"token_id:{token}" for token in scored.token_ids]
    assert set(scored.logprobs.top_logprobs[0]) == {scored.logprobs.tokens[0]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = complete(stream=True, stream_options=options, max_tokens=400)
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts[0] < counts[-1] == 400
    assert counts == sorted(counts)
    until(lambda: any("request mine:" in line and "20 completion tokens" in line for line in server.log))


def test_scoring_a_text_draws_nothing(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].logprobs is not None
    scored = answer.choices[0].logprobs
    assert len(scored.tokens or ()) == answer.usage.prompt_tokens
    wanted = zip(scored.tokens or (), scored.token_logprobs or (), strict=True)
    assert scored.top_logprobs == [None, *({token: score} for token, score in list(wanted)[1:])]


@pytest.mark.parametrize(
    "params",
    [
        {"stop": [" boat", "zzz"]},
        {"stop": " boat", "extra_body": {"include_stop_str_in_output": True}},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {"33": 100}},
        {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}, "temperature": 0.8, "seed": 3},
        {"extra_body": {"stop_token_ids": [13], "min_tokens": 2, "bad_words": ["boat"]}},
    ],
    ids=str,
)
def test_parameters_mean_what_they_mean_to_the_engine(client: openai.OpenAI, llm: LLM, params: dict[str, Any]) -> None:
    own = {k: v for k, v in params.items() if k != "extra_body"} | params.get("extra_body", {})
    if "logit_bias" in own:
        own["logit_bias"] = {int(k): v for k, v in own["logit_bias"].items()}
    defaults: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 16}
    answer = client.completions.create(**defaults | params)
    assert answer.choices[0].text == text_of(llm, PROMPT, **own)


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 1})
    scores = (answer.choices[0].model_extra or {})["prompt_logprobs"]
    assert answer.usage is not None
    assert len(scores) == answer.usage.prompt_tokens
    assert scores[0] is None
    assert all(each["rank"] >= 1 for position in scores[1:] for each in position.values())


def test_many_async_streams_at_once(server: RunningServer, llm: LLM) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="demo", prompt=f"{PROMPT} {number}", temperature=0, max_tokens=8, stream=True
        )
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async def all_of() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    found = asyncio.run(all_of())
    assert found == [text_of(llm, f"{PROMPT} {number}", max_tokens=8) for number in range(24)]
