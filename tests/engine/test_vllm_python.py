"""Python as vLLM's users write it. Transformers' own beam search judges ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, TokensPrompt
from hardpoint_plugin_api import CapacityError, ConfigError, RequestError, StructuredOutput
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import small_llm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "qwen3")


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    with small_llm(checkpoint[0], max_logprobs=8) as engine:
        yield engine


def test_beam_search_finds_what_transformers_finds(llm: LLM, checkpoint: tuple[Path, PreTrainedModel]) -> None:
    prompts: Any = random_prompts(3, 12, shortest=2)
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    for prompt, output in zip(prompts, found, strict=True):
        generate: Any = checkpoint[1].generate
        wanted = generate(
            torch.tensor([prompt]),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            length_penalty=0.0,
        )
        assert [list(beam.tokens) for beam in output.sequences] == wanted.sequences.tolist()
        scores = torch.tensor([beam.cum_logprob for beam in output.sequences])
        torch.testing.assert_close(scores, wanted.sequences_scores, atol=1e-4, rtol=1e-4)


def test_beams_end_where_sequences_do(llm: LLM) -> None:
    """As outputs of ``generate`` do; a shorter prompt's beams go on."""
    longest = llm.client.facts.max_model_len
    prompts: Any = [random_prompts(1, longest - 3, shortest=longest - 4)[0], [1, 2]]
    full, short = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))
    assert [len(beam.tokens) for beam in full.sequences] == [longest] * 2
    assert [len(beam.tokens) for beam in short.sequences] == [8] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_penalty": float("nan")}, "length_penalty must be a number from -100 to 100, got nan"),
        ({"length_penalty": 1e6}, "length_penalty must be a number from -100 to 100"),
        ({"length_penalty": "x"}, "length_penalty must be a number from -100 to 100, got 'x'"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"beam_width": 200}, "beam_width must be at most 129, half of the vocabulary, got 200"),
    ],
)
def test_beams_that_cannot_be(llm: LLM, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.beam_search([[1, 2]], BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **options}))


def test_beams_end_with_the_end_token(llm: LLM) -> None:
    ended = [
        beam
        for seed in range(8)
        for output in llm.beam_search([*random_prompts(4, 9, seed=seed)], BeamSearchParams(beam_width=4, max_tokens=12))
        for beam in output.sequences
        if beam.has_ended
    ]
    assert ended, "no end was among the likeliest tokens: draw other prompts"
    assert all(beam.tokens[-1] in llm.eos_token_ids for beam in ended)
    assert not any(token in llm.eos_token_ids for beam in ended for token in beam.tokens[-13:-1])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"choice": ["yes", "no"]}, StructuredOutput.choice(["yes", "no"])),
        ({"regex": "a+"}, StructuredOutput.regex("a+")),
        ({"json": {"type": "integer"}}, StructuredOutput.json_schema({"type": "integer"})),
        ({"grammar": 'start: "a"'}, StructuredOutput.grammar('start: "a"')),
        ({"json_object": True}, StructuredOutput.json_object()),
    ],
)
def test_structured_outputs(theirs: dict[str, Any], ours: StructuredOutput) -> None:
    assert SamplingParams(structured_outputs=StructuredOutputsParams(**theirs)).structured == ours
    assert SamplingParams(structured_outputs=theirs).structured == ours


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "takes one of .*, got regex and choice"),
        ({"structured_outputs": {}}, "got None"),
        ({"structured_outputs": {"regexp": "a"}}, "has no regexp; known: json, regex"),
        ({"structured_outputs": {"regex": "a"}, "structured": StructuredOutput.regex("a")}, "are the same; give one"),
        ({"logits_processors": [print]}, "logits_processors has no counterpart"),
        ({"extra_args": {"a": 1}}, "extra_args has no counterpart"),
        ({"thinking_token_budget": 5}, "thinking_token_budget has no counterpart: max_tokens limits"),
        ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "are the same; give one"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        ({"truncation_side": "middle"}, "truncation_side must be left or right"),
    ],
)
def test_parameters_that_are_refused(given: dict[str, Any], answer: str) -> None:
    with pytest.raises(RequestError, match=answer):
        SamplingParams(**given)


def test_parameters_of_vllm_that_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    defaults: dict[str, Any] = {"detokenize": True, "length_penalty": 1.0, "best_of": None, "logits_processors": []}
    defaults |= {"skip_reading_prefix_cache": False, "watermarking": False, "truncation_side": None}
    assert SamplingParams(**defaults | {"best_of": 1}) == SamplingParams()
    defaults |= {"guided_decoding": None, "structured_outputs": None}
    assert SamplingParams(**defaults) == SamplingParams()
    assert caplog.messages == []
    harmless: dict[str, Any] = {"detokenize": False}
    assert SamplingParams(**harmless) == SamplingParams(**harmless) == SamplingParams()
    assert caplog.messages == ["detokenize has no effect: texts are made all the same"]
    older: dict[str, Any] = {"guided_decoding": {"regex": "a"}}
    assert SamplingParams(**older).structured == StructuredOutput.regex("a")


def test_a_prompt_is_truncated_at_either_side(llm: LLM) -> None:
    prompt = TokensPrompt(prompt_token_ids=list(range(40)))
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=5)
    (output,) = llm.generate(prompt, params)
    (same,) = llm.generate({"prompt_token_ids": [35, 36, 37, 38, 39]}, SamplingParams(temperature=0, max_tokens=4))
    assert output.prompt_token_ids == [35, 36, 37, 38, 39]
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    (output,) = llm.generate(prompt, replace(params, truncation_side="right"))
    assert output.prompt_token_ids == [0, 1, 2, 3, 4]
    longest = SamplingParams(max_tokens=None, truncate_prompt_tokens=-1)
    (output,) = llm.generate([[3] * (llm.client.facts.max_model_len + 9)], longest)
    assert len(output.prompt_token_ids) == llm.client.facts.max_model_len - 1


def test_log_probabilities_are_bounded(llm: LLM) -> None:
    for params, given in (
        (SamplingParams(logprobs=9), "logprobs must be at most 8 (--max-logprobs), got 9"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs must be at most 8 (--max-logprobs), got -1"),
    ):
        with pytest.raises(RequestError, match=re.escape(given)):
            llm.generate("a", params)


def test_methods(llm: LLM) -> None:
    assert llm.get_tokenizer() is llm.tokenizer
    assert "hardpoint_steps" in {metric.name for metric in llm.get_metrics()}
    with pytest.raises(AttributeError, match=r"LLM.collective_rpc is vLLM's name: use control"):
        llm.collective_rpc("f")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        llm.nothing  # noqa: B018  # a name that is not there
    assert not hasattr(llm, "embed")


def test_without_a_tokenizer(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    checkpoint[1].save_pretrained(tmp_path)  # which has no tokenizer
    with small_llm(tmp_path, skip_tokenizer_init=True) as llm, small_llm(checkpoint[0]) as other:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,), (wanted,) = llm.generate([[5, 6, 7]], params), other.generate([[5, 6, 7]], params)
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert output.outputs[0].text == ""
        refused: list[tuple[Any, dict[str, Any], str]] = [
            ("a", {}, r"no tokenizer was loaded \(--skip-tokenizer-init\): give token ids"),
            ([5], {"stop": "a"}, "give stop_token_ids"),
            ([5], {"bad_words": ["a"]}, "no tokenizer was loaded"),
            ([5], {"structured_outputs": {"regex": "a"}}, "structured output .* tokenizer"),
        ]
        for prompt, given, answer in refused:
            with pytest.raises(RequestError, match=answer):
                llm.generate([prompt], SamplingParams(**given))


def test_a_share_of_the_memory(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    with small_llm(checkpoint[0], kv_cache_memory=None, gpu_memory_utilization=0.99, max_model_len=64) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=2))[0].finished
    with pytest.raises(CapacityError, match=r"--gpu-memory-utilization 1e-05 is .* bytes of .*; raise it"):
        small_llm(checkpoint[0], kv_cache_memory=None, gpu_memory_utilization=1e-5)
    with pytest.raises(ConfigError, match="must be 1 or less"):
        small_llm(checkpoint[0], kv_cache_memory=None, gpu_memory_utilization=1.5)
