"""Each format on two ranks: each reads its share of every tensor, and together they compute what one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import ConfigError
from tests.parallel.ranks import ranks_in_threads
from tests.quantization.formats import FORMATS
from tests.quantization.turning import TURNS, turning
from tests.quantization.writing import Format, write_quantized
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import small_llm

DIVISIBLE = {"intermediate_size": 128, "num_key_value_heads": 4}
REFUSED = {
    "fp8-block-apart": "quantized in blocks of 128, and ranks would have 32 of its 64 rows each",
    "gptq-4-desc-act": r"in groups that are no neighbours \(act-order\), which cannot be divided",
    "gptq-8": r"in groups that are no neighbours \(act-order\)",
    "awq-gemv": r"in a form that ranks cannot divide \(its 'scales' is one piece\)",
    "ct-w4a16-actorder": r"in groups that are no neighbours \(act-order\)",
}
"""A model that cannot be divided -> the error, which comes before weights are read."""
QUICK = ("fp8-block", "gptq-4", "ct-w4a16")
BY_NIGHT = {"fp8-channel", "fp8-static", "gptq-4-v2", "gptq-8-asymmetric", "ct-int8-asymmetric", "ct-fp8-block"}
BY_NIGHT |= {"ct-w8a16", "ct-w8a16-asymmetric", "ct-w4a8", "ct-mxfp4", "ct-mxfp8", "ct-nvfp4a16"}
BY_NIGHT |= {
    "modelopt-fp8",
    "modelopt-fp8-channel",
    "modelopt-nvfp4",
    "modelopt-mxfp8",
    "gptq-2-asymmetric",
    "fp8-act-scale",
}
"""Formats that differ from another one in what ranks do not divide: the meaning of a number, or its size."""
DIVIDED = [pytest.param(form, id=form.name, marks=[pytest.mark.nightly] * (form.name in BY_NIGHT)) for form in FORMATS]
STAGED = [pytest.param(form, id=form.name, marks=[pytest.mark.nightly] * (form.name not in QUICK)) for form in FORMATS]


def prompt_scores(llm: LLM) -> torch.Tensor:
    """The log-probability of each token of some prompts."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = random_prompts(3, 30, seed=4, shortest=20)
    scores = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        found = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        scores += [entry[token].logprob for token, entry in found if entry is not None]
    return torch.tensor(scores)


@pytest.mark.parametrize("form", DIVIDED)
def test_two_ranks_compute_what_one_does(tmp_path: Path, form: Format) -> None:
    write_quantized(tmp_path, form, "qwen2", **DIVISIBLE)
    if form.name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[form.name]), ranks_in_threads(tmp_path, 2):
            pass
        return
    check(tmp_path, form)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", "fp8-block"),
        ("qwen3_next", "gptq-4"),
        ("phi3", "awq"),
        ("phi3", "fp8-channel"),
        *(
            pytest.param(family, name, marks=pytest.mark.nightly)
            for family in ("qwen3_next", "phi3")
            for name in ("fp8-tensor", "fp8-static", "ct-w4a16", "gptq-8-asymmetric", "ct-nvfp4", "modelopt-fp8")
        ),
        pytest.param("qwen3_next", "awq", marks=pytest.mark.nightly),
        pytest.param("phi3", "fp8-block", marks=pytest.mark.nightly),
    ],
)
def test_parts_of_one_tensor(tmp_path: Path, family: str, name: str) -> None:
    """A rank has a piece of each part, and these lie apart in the tensor."""
    form = turning(next(form for form in FORMATS if form.name == name))
    write_quantized(tmp_path, form, family, **(TURNS if family == "qwen3_next" else DIVISIBLE))
    check(tmp_path, form)


def test_blocks_of_one_tensor_that_ranks_cut(tmp_path: Path) -> None:
    form = next(form for form in FORMATS if form.name == "fp8-block")
    write_quantized(tmp_path, form, "phi3", **DIVISIBLE)
    cut = r"mixer\.qkv' is quantized in blocks of 32, and ranks would have 16 of its 64 rows each"
    with pytest.raises(ConfigError, match=cut), ranks_in_threads(tmp_path, 4):
        pass


def check(folder: Path, form: Format) -> None:
    """Two ranks compute what one does."""
    with small_llm(folder) as llm:
        alone = prompt_scores(llm)
    with ranks_in_threads(folder, 2) as llm:
        together = prompt_scores(llm)
    difference = (together - alone).abs()
    if form.inputs is None:
        assert difference.max() < 2e-4
    else:  # activations are rounded by what each rank has of them
        assert difference.median() < 0.1


@pytest.mark.parametrize("head", ["int8", "true"])
def test_a_quantized_head(tmp_path: Path, head: str) -> None:
    """The vocabulary is divided, and what a rank has of it is quantized as a whole."""
    write_checkpoint(tmp_path, "qwen3", vocab_size=259, intermediate_size=128, num_key_value_heads=4)
    settings = {"quantization": "int4", "quantization_options": f"group_size=32,lm_head={head}"}
    with small_llm(tmp_path, **settings) as llm:
        alone = prompt_scores(llm)
    with ranks_in_threads(tmp_path, 2, **settings) as llm:
        together = prompt_scores(llm)
    assert (together - alone).abs().max() < 2e-4


@pytest.mark.parametrize("form", STAGED)
def test_two_stages_compute_what_one_does(tmp_path: Path, form: Format) -> None:
    """A stage neither misses nor reads the tensors of the other's layers, whatever their format calls them."""
    write_quantized(tmp_path, form, "qwen2", **DIVISIBLE)
    with small_llm(tmp_path) as llm:
        alone = prompt_scores(llm)
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2) as llm:
        assert torch.equal(prompt_scores(llm), alone)


def test_random_weights_do_not_depend_on_stages(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path, load_format="random") as llm:
        alone = prompt_scores(llm)
    with ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2, load_format="random") as llm:
        assert torch.equal(prompt_scores(llm), alone)
