"""The engine on a real accelerator: the platform contract proved on a device, with whatever serves there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits

pytestmark = pytest.mark.accelerator

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {}),
    "qwen3-head128": ("qwen3", {"head_dim": 128}),
    "mixtral": ("mixtral", {"num_local_experts": 8}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
}
LOGIT_TOLERANCE = 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens_match_transformers_on_the_host(shape: str, tmp_path: Path) -> None:
    family, changes = SHAPES[shape]
    model = write_checkpoint(tmp_path, family, **changes)
    with LLM(str(tmp_path), kv_cache_memory="64MiB", max_num_seqs=16) as llm:
        assert llm.core.blueprint.ctx.device.accelerator, "the accelerator is meant to be chosen without a flag"
        assert llm.core.blueprint.ctx.torch_device.type != "cpu"
        (prompt,) = random_prompts(1, 90, seed=1, shortest=90)
        difference = (prompt_logits(llm, prompt).cpu() - reference_logits(model, prompt)).abs().max()
        assert difference < LOGIT_TOLERANCE
        prompts = random_prompts(16, 40, seed=2)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids, LOGIT_TOLERANCE)


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "fp8"},
        {"quantization": "fp8", "quantization_options": ["scales=block"]},
        {"quantization": "int8"},
        {"quantization": "int4", "quantization_options": ["group_size=32"]},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "nvfp4"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("qwen3_moe", EXPERTS)])
def test_quantized_logits_are_those_of_the_host(
    family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Numbers that the device rounds the other way move logits by little, or a token to another expert now and then.

    On the host alone, a ten-thousandth of noise in these layers' outputs (tensor cores add 8-bit floats up about so
    precisely) leaves 90 to 93 % of the logits within this bound, where there are experts; a scale that is wrong by 5 %
    in one layer 64 %, by 20 % one in a hundred.
    """
    write_checkpoint(tmp_path, family, hidden_size=128, **changes)
    (prompt,) = random_prompts(1, 90, seed=1, shortest=90)
    logits = []
    for platform in (None, "cpu"):
        with LLM(str(tmp_path), platform=platform, kv_cache_memory="64MiB", **settings) as llm:
            logits.append(prompt_logits(llm, prompt).cpu())
    assert (torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=-1) > 0.995).float().mean() > 0.8


def test_seeded_sampling_draws_the_same_tokens_as_on_the_host(tmp_path: Path) -> None:
    """Counter-based random numbers: in float32 the same seeds give the same tokens on the device as on the CPU."""
    write_checkpoint(tmp_path, "qwen3")
    prompts = random_prompts(8, 20, seed=3)
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=i, max_tokens=12, ignore_eos=True) for i in range(8)
    ]
    drawn = []
    for platform in (None, "cpu"):
        with LLM(str(tmp_path), platform=platform, kv_cache_memory="64MiB", max_num_seqs=8) as llm:
            drawn.append([o.outputs[0].token_ids for o in llm.generate(prompts, sampling, use_tqdm=False)])
    same = sum(a == b for a, b in zip(*drawn, strict=True))
    assert same >= 7, f"only {same} of 8 sequences agree"


def test_memory_is_given_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    llm = LLM(str(tmp_path), kv_cache_memory="1GiB", max_num_seqs=256)
    held = llm.core.blueprint.platform.memory.snapshot()
    llm.close()
    platform = llm.core.blueprint.platform
    del llm
    torch.accelerator.empty_cache()
    assert platform.memory.snapshot().free > held.free


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleeps_is_free_for_others(level: int, tmp_path: Path) -> None:
    """The driver has the memory back, by the tags' own account, and a model that woke up has the logits it had."""
    write_checkpoint(tmp_path, "qwen3", hidden_size=512, intermediate_size=4096)
    (prompt,) = random_prompts(1, 90, seed=1, shortest=90)
    with LLM(str(tmp_path), kv_cache_memory="1GiB", max_num_seqs=16) as llm:
        logits, tokens = prompt_logits(llm, prompt), generated(llm, prompt)
        torch.accelerator.empty_cache()
        held, taken = llm.memory_report().by_tag, torch.accelerator.memory_reserved()
        llm.sleep(level)
        asleep = llm.memory_report().by_tag
        tags = held.keys() - {"graphs"}  # of which the driver's part is told by free memory, others' allocations too
        given_back = sum(held[tag] - asleep[tag] for tag in tags)
        assert given_back > 2**30
        assert taken - torch.accelerator.memory_reserved() > 0.95 * given_back
        llm.wake_up()
        assert torch.equal(prompt_logits(llm, prompt), logits)
        assert generated(llm, prompt) == tokens
        again = llm.memory_report().by_tag
        assert again.keys() == held.keys(), "graphs that are made when first met are there again, too"
        assert all(again[tag] == held[tag] for tag in tags)


def generated(llm: LLM, prompt: list[int]) -> list[int]:
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
    return output.outputs[0].token_ids
