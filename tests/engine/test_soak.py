"""Many mixed requests through one engine: every output is right, nothing is left over, memory stops growing."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hardpoint import LLM, SamplingParams
from hardpoint.checkpoint.source import demo_model
from tests.support.checkpoints import check_tokens_equal

HELD_OUT = demo_model() / "heldout.txt"


def resident_bytes() -> int:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(num_requests: int, wave: int) -> None:
    """Waves of greedy and seeded requests, long and short, some with a common start, on a pool that is too small."""
    generator = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()
    llm = LLM(
        "demo",
        platform="cpu",
        dtype="float32",
        kv_cache_memory="6MiB",
        max_model_len=256,
        max_num_seqs=24,
        max_num_batched_tokens=96,
        async_scheduling=True,
        plugin_config={"cpu": {"threads": 1}},
    )
    text = llm.tokenizer.encode(HELD_OUT.read_text(encoding="utf-8"))
    common = text[:70]
    grown: list[int] = []
    preemptions = 0
    with llm:
        for _ in range(num_requests // wave):
            prompts, params = [], []
            for _ in range(wave):
                start = generator.randrange(len(text) - 200)
                prompt = text[start : start + generator.randint(1, 120)]
                prompts.append(common + prompt[:40] if generator.random() < 0.3 else prompt)
                greedy = generator.random() < 0.9
                params.append(
                    SamplingParams(
                        temperature=0.0 if greedy else 0.9,
                        top_p=1.0 if greedy else 0.9,
                        seed=generator.randrange(2**32),
                        max_tokens=generator.randint(1, 24),
                        ignore_eos=True,
                    )
                )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            preemptions += sum(output.metrics.num_preemptions for output in outputs)
            for prompt, each, output in zip(prompts, params, outputs, strict=True):
                tokens = output.outputs[0].token_ids
                assert len(tokens) == each.max_tokens
                if each.is_greedy:
                    check_tokens_equal(model, prompt, tokens)
            seeded = next(i for i, each in enumerate(params) if not each.is_greedy)
            alone = llm.generate([prompts[seeded]], params[seeded], use_tqdm=False)[0]
            assert alone.outputs[0].token_ids == outputs[seeded].outputs[0].token_ids
            pool = llm.core.scheduler.cache.pool
            assert not llm.core.has_unfinished
            assert pool.num_free == pool.num_usable
            grown.append(resident_bytes())
    assert preemptions > 0, "the pool is meant to be too small"
    half = len(grown) // 2
    assert max(grown[half:]) - max(grown[:half]) < 16 * 2**20, f"memory grows: {[g >> 20 for g in grown]} MiB"


def test_a_short_soak() -> None:
    soak(100, 25)


@pytest.mark.nightly
def test_a_soak_of_two_thousand() -> None:
    soak(2000, 100)
