"""Batch-invariant mode through the whole engine: a request's output is the same to the bit whatever else runs."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hardpoint import LLM, SamplingParams
from hardpoint.engine.outputs import RequestOutput
from hardpoint.reference.batch_invariant_linear import BatchInvariantLinear
from hardpoint_plugin_api import LinearCall
from tests.support.checkpoints import LLAMA4, random_prompts, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "llama4": ("llama4", LLAMA4 | {"num_hidden_layers": 3, "no_rope_layer_interval": 3}),
}
PROMPTS = random_prompts(5, 60, seed=21, shortest=35)
SAMPLING = [
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=1, max_tokens=12, ignore_eos=True, logprobs=5),
    SamplingParams(
        temperature=1.3,
        min_p=0.02,
        seed=2,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        max_tokens=12,
        ignore_eos=True,
        logprobs=0,
    ),
    SamplingParams(temperature=1.0, seed=3, logit_bias={7: 4.0, 9: -3.0}, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.8, seed=4, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=2),
]
"""The requests that are compared, alone and among others."""

Seen = tuple[list[int], object, object]


def seen(output: RequestOutput) -> Seen:
    """The bits that a user gets: tokens, and log-probabilities as float32 gave them."""
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs


def alone(llm: LLM) -> list[Seen]:
    """Each request by itself."""
    return [seen(llm.generate([p], s, use_tqdm=False)[0]) for p, s in zip(PROMPTS, SAMPLING, strict=True)]


def among(llm: LLM, count: int, seed: int = 0) -> tuple[list[Seen], list[RequestOutput]]:
    """The requests in a crowd of ``count`` random others, and all outputs."""
    generator = random.Random(seed)
    requests = list(zip(PROMPTS, SAMPLING, strict=True))
    requests += [(prompt, _any_sampling(generator)) for prompt in random_prompts(count, 60, seed=seed)]
    order = generator.sample(range(len(requests)), len(requests))
    outputs = llm.generate([requests[i][0] for i in order], [requests[i][1] for i in order], use_tqdm=False)
    by_request = dict(zip(order, outputs, strict=True))
    return [seen(by_request[i]) for i in range(len(PROMPTS))], outputs


def _any_sampling(generator: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=generator.choice([0.0, 0.5, 1.5]),
        top_k=generator.choice([-1, 5]),
        top_p=generator.choice([1.0, 0.9]),
        frequency_penalty=generator.choice([0.0, 0.5]),
        allowed_token_ids=generator.choice([None, list(range(100))]),
        max_tokens=generator.randint(1, 25),
        ignore_eos=True,
        logprobs=generator.choice([None, 20]),
        prompt_logprobs=generator.choice([None, 20]),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (family, changes) in SHAPES.items():
        found[name] = tmp_path_factory.mktemp(name)
        write_checkpoint(found[name], family, **changes)
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Any:
    """``expected(shape, dtype)``: what each request gives by itself, in an engine that leaves prompts whole."""

    @cache
    def compute(shape: str, dtype: str) -> list[Seen]:
        with small_llm(folders[shape], batch_invariant=True, dtype=dtype, enable_prefix_caching=False) as llm:
            return alone(llm)

    return compute


PAGE_ELEMENTS = 3 * 2 * 16 * 2 * 16
"""Of all layers of a tiny model."""

SETTINGS: dict[str, dict[str, Any]] = {
    "depth-1": {"async_scheduling": True},
    "chunks-of-8": {"max_num_batched_tokens": 8},
    "chunks-of-33-depth-1": {"max_num_batched_tokens": 33, "async_scheduling": True},
    "chunks-of-512-many-at-once": {"max_num_batched_tokens": 512, "max_num_seqs": 64},
    "two-at-once": {"max_num_seqs": 2},
}


def test_a_request_gives_the_same_bits_in_every_crowd(folders: dict[str, Path], expected: Any) -> None:
    with small_llm(folders["qwen3"], batch_invariant=True) as llm:
        for count in (0, 1, 5, 30):
            assert among(llm, count, seed=count)[0] == expected("qwen3", "float32"), f"{count} others"


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_request_gives_the_same_bits_however_it_is_scheduled(
    folders: dict[str, Path], expected: Any, settings: str
) -> None:
    with small_llm(folders["qwen3"], batch_invariant=True, **SETTINGS[settings]) as llm:
        assert among(llm, 12)[0] == expected("qwen3", "float32")


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((s, "float32") for s in SHAPES), ("mistral-window", "bfloat16"), ("qwen3", "bfloat16")]
)
def test_preempted_requests_of_every_family(folders: dict[str, Path], expected: Any, shape: str, dtype: str) -> None:
    pages = 12 if shape in ("mistral-window", "olmo3", "llama4") else 24  # windows and chunks give pages back
    small: dict[str, Any] = {
        "kv_cache_memory": pages * PAGE_ELEMENTS * getattr(torch, dtype).itemsize,
        "max_model_len": 96,
        "max_num_batched_tokens": 33,
        "async_scheduling": True,
    }
    with small_llm(folders[shape], batch_invariant=True, dtype=dtype, **small) as llm:
        found, outputs = among(llm, 10)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    assert found == expected(shape, dtype)


@pytest.mark.parametrize("chunk", [8, 512])
def test_a_cached_prefix_gives_the_same_bits(folders: dict[str, Path], expected: Any, chunk: int) -> None:
    with small_llm(folders["mistral-window"], batch_invariant=True, max_num_batched_tokens=chunk) as llm:
        cold = among(llm, 5)[0]
        before = llm.stats.prefill_tokens
        warm = among(llm, 5)[0]
        again = llm.stats.prefill_tokens - before
    assert again < before, "prefixes are meant to come from the cache"
    assert cold == warm == expected("mistral-window", "float32")


def test_two_threads(folders: dict[str, Path]) -> None:
    """The number of threads is the engine's own: results may differ from those of one thread, not among themselves."""
    with small_llm(folders["qwen3"], batch_invariant=True, plugin_config={"cpu": {"threads": 2}}) as llm:
        assert among(llm, 5)[0] == alone(llm)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_do_not_depend_on_chunks(folders: dict[str, Path], shape: str) -> None:
    (prompt,) = random_prompts(1, 90, seed=8, shortest=90)
    with small_llm(folders[shape], batch_invariant=True) as llm:
        whole = prompt_logits(llm, prompt)
        for chunk in (1, 8, 33):
            assert torch.equal(prompt_logits(llm, prompt, chunk), whole), f"chunks of {chunk}"


def test_this_test_finds_a_matmul_that_depends_on_the_number_of_rows(
    folders: dict[str, Path], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: one row alone is added up in two halves, as a matrix-vector kernel might."""

    def apply(self: object, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        weight, half = weights["weight"], x.shape[-1] // 2
        if x.shape[0] > 1:
            return functional.linear(x, weight, bias)
        return functional.linear(x[:, :half], weight[:, :half], bias) + functional.linear(x[:, half:], weight[:, half:])

    settings = {"batch_invariant": True, "linear_backend": "torch_batch_invariant"}
    (prompt,) = random_prompts(1, 40, seed=8, shortest=40)
    with small_llm(folders["qwen3"], **settings) as llm:
        assert torch.equal(prompt_logits(llm, prompt, 1), prompt_logits(llm, prompt))
        assert among(llm, 5)[0] == alone(llm)
    monkeypatch.setattr(BatchInvariantLinear, "apply", apply)
    with small_llm(folders["qwen3"], **settings) as llm:
        assert not torch.equal(prompt_logits(llm, prompt, 1), prompt_logits(llm, prompt))
        assert among(llm, 5)[0] != alone(llm)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_the_demo_model_in_engines_of_all_kinds(seed: int) -> None:
    generator = random.Random(seed)
    dtype, threads = generator.choice(["float32", "bfloat16"]), generator.choice([1, 2])
    common = {"dtype": dtype, "batch_invariant": True, "plugin_config": {"cpu": {"threads": threads}}}
    with small_llm(Path("demo"), **common) as llm:
        reference = alone(llm)
    settings = {
        "max_num_batched_tokens": generator.choice([8, 33, 100, 512]),
        "max_num_seqs": generator.choice([2, 7, 64]),
        "async_scheduling": generator.choice([False, True]),
        "enable_prefix_caching": generator.choice([False, True]),
        "kv_cache_memory": generator.choice(["2MiB", "16MiB"]),
        "max_model_len": 96,
    }
    with small_llm(Path("demo"), **common, **settings) as llm:
        for crowd in range(3):
            assert among(llm, 10 * crowd + 3, seed=10 * seed + crowd)[0] == reference, (common, settings)


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_an_accelerator(folders: dict[str, Path], dtype: str) -> None:
    with LLM(str(folders["qwen3"]), batch_invariant=True, dtype=dtype, kv_cache_memory="16MiB", max_num_seqs=9) as llm:
        assert llm.core.blueprint.ctx.device.accelerator
        assert among(llm, 12)[0] == alone(llm)
