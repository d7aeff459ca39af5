"""A hybrid of gated delta nets and attention in the engine: tokens as Transformers gives them, however it is set up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hardpoint import SamplingParams
from hardpoint.conformance.families.model_samples import TINY
from hardpoint.drafters.ngram import NgramDrafter
from hardpoint_plugin_api import NO_DRAFT, CheckpointError, DraftCall, SelectionError
from tests.support.checkpoints import (
    GATED_DELTA,
    GATED_DELTA_MOE,
    KIMI_LINEAR,
    NEMOTRON_H,
    check_tokens_equal,
    random_prompts,
    reference_logits,
    write_checkpoint,
    write_tokenizer,
)
from tests.support.engines import counted, prompt_logits, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_next")
    return folder, write_checkpoint(folder, "qwen3_next", **GATED_DELTA_MOE)


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": False},
        {"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 3},
        {"async_scheduling": True, "enable_prefix_caching": False},
        {"async_scheduling": False, "enforce_eager": True, "max_num_batched_tokens": 8, "block_size": 4},
    ],
    ids=str,
)
def test_tokens_equal_however_the_engine_is_set_up(
    hybrid: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    folder, model = hybrid
    prompts = random_prompts(3, 60, seed=2, shortest=20)
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts if len(prompt) > 30]
    with small_llm(folder, **({"block_size": 16} | settings)) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert (llm.core.scheduler.num_cached_tokens > 0) == settings.get("enable_prefix_caching", True)
        assert (counted(llm).get("graph_replays_total", 0) > 0) == (not settings.get("enforce_eager", False))
        pool = llm.core.scheduler.cache.pool
        assert pool.num_free == pool.num_usable, "pages leaked"


def test_preemption_with_a_pool_that_is_too_small(hybrid: tuple[Path, PreTrainedModel]) -> None:
    folder, model = hybrid
    prompts = random_prompts(6, 50, seed=5, shortest=30)
    settings: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 16, "async_scheduling": True}
    with small_llm(folder, kv_cache_memory="300KiB", block_size=16, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_batch_invariance_is_refused(hybrid: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(SelectionError, match="batch_invariant"):
        small_llm(hybrid[0], batch_invariant=True)


@pytest.mark.parametrize(
    ("architecture", "changes", "settings"),
    [
        ("qwen3_next", GATED_DELTA_MOE, {"async_scheduling": True, "block_size": 16}),
        ("kimi_linear", KIMI_LINEAR, {"async_scheduling": False, "max_num_batched_tokens": 40}),
        ("nemotron_h", NEMOTRON_H, {"async_scheduling": True, "enable_prefix_caching": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_drafts_leave_no_trace(
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Convolutions and recurrences go on from where a draft was refused, beside prompts that are read in parts."""
    model = write_checkpoint(tmp_path, architecture, **changes)
    prompts = random_prompts(4, 60, seed=3, shortest=20)
    with small_llm(tmp_path, max_num_seqs=3, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    known = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, tokens in zip(prompts, known, strict=True):
        check_tokens_equal(model, prompt, tokens[len(prompt) :])
    monkeypatch.setattr(NgramDrafter, "propose", _right_now_and_then(known))
    with small_llm(tmp_path, speculative_method="ngram", max_num_seqs=3, **settings) as llm:
        for _ in range(2):
            for tokens, output in zip(known, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                assert tokens[-24:] == list(output.outputs[0].token_ids)
        assert 0 < llm.stats.accepted_tokens < llm.stats.drafted_tokens


def _right_now_and_then(known: Sequence[list[int]]) -> Callable[[NgramDrafter, DraftCall], torch.Tensor]:
    """A ``propose`` of what follows in the sequence of ``known`` that a request has begun.

    It is wrong at one place: the length of what is begun, modulo 5.
    """

    def propose(drafter: NgramDrafter, call: DraftCall) -> torch.Tensor:
        drafts = torch.full((len(call.slots), 4), NO_DRAFT)
        for row, (slot, length) in enumerate(zip(call.slots.tolist(), call.lengths.tolist(), strict=True)):
            begun = call.tokens[slot, :length].tolist()
            rest = next((tokens[length : length + 4] for tokens in known if tokens[:length] == begun), [])
            drafts[row, : len(rest)] = torch.tensor([t + (place == length % 5) for place, t in enumerate(rest)])
        return drafts

    return propose


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5", **GATED_DELTA)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"linear_num_key_heads": 3}))
    with pytest.raises(CheckpointError, match=r"'linear_num_value_heads' must be a multiple .* got 4 and 3"):
        small_llm(tmp_path)


def test_a_checkpoint_with_a_vision_tower(tmp_path: Path) -> None:
    """Its language model is served; the other tensors, and those of multi-token prediction, are left out."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=TINY | GATED_DELTA, vision_config=vision)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    (prompt,) = random_prompts(1, 40, seed=1, shortest=40)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4
