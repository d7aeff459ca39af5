"""The tokens are Transformers', whatever the engine does meanwhile: each way of scheduling, requests cancelled."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from tests.support.checkpoints import LLAMA4, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3-windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PAGE_BYTES = 2 * 16 * 2 * 16 * 4


BY_NIGHT = {
    "llama4": (
        "llama4",
        LLAMA4 | {"num_hidden_layers": 3, "no_rope_layer_interval": 3, "attention_chunk_size": 50},
    ),
    "olmo3": (
        "olmo3",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


@pytest.fixture(scope="module", params=[*SHAPES, *(pytest.param(name, marks=pytest.mark.nightly) for name in BY_NIGHT)])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    family, changes = (SHAPES | BY_NIGHT)[request.param]
    return folder, write_checkpoint(folder, family, **changes)


def way(caching: bool, chunk: int, tight: bool, ahead: bool) -> Any:
    """By day, half of the ways: every combination of three of the four settings is among them."""
    by_night = (caching + (chunk == 8) + tight + ahead) % 2
    return pytest.param(caching, chunk, tight, ahead, False, marks=[pytest.mark.nightly] if by_night else [])


WAYS = [
    *(way(*settings) for settings in itertools.product([True, False], [8, 512], [True, False], [False, True])),
    (True, 8, True, True, True),
    (False, 512, True, False, True),
]


@pytest.mark.parametrize(("caching", "chunk", "tight", "ahead", "eager"), WAYS)
def test_every_way_of_scheduling(
    checkpoint: tuple[Path, PreTrainedModel], caching: bool, chunk: int, tight: bool, ahead: bool, eager: bool
) -> None:
    folder, model = checkpoint
    generator = random.Random(f"{caching} {chunk} {tight} {ahead}")
    wanted = random_prompts(8, 50, seed=3)
    wanted += [[*prompt, 1, 2] for prompt in wanted if len(prompt) > 32]
    others = random_prompts(6, 60, seed=4) + [prompt[:-1] for prompt in wanted[:3] if len(prompt) > 1]
    with small_llm(
        folder,
        enable_prefix_caching=caching,
        max_num_batched_tokens=chunk,
        async_scheduling=ahead,
        enforce_eager=eager,
        max_model_len=96,
        kv_cache_memory=30 * PAGE_BYTES if tight else "16MiB",
    ) as llm:
        prompts = [(prompt, True) for prompt in wanted] + [(prompt, False) for prompt in others]
        generator.shuffle(prompts)
        streams = [(llm.stream(prompt, GREEDY), prompt, kept) for prompt, kept in prompts]
        patience = {id(stream): generator.randint(0, 12) for stream, _, kept in streams if not kept}
        preemptions = 0
        while streams:
            for entry in tuple(streams):
                stream, prompt, kept = entry
                output = next(stream, None)
                if output is None:
                    assert not kept
                    streams.remove(entry)  # it ended before it was to be cancelled
                elif kept and output.finished:
                    check_tokens_equal(model, prompt, output.outputs[0].token_ids)
                    preemptions += output.metrics.num_preemptions
                    streams.remove(entry)
                elif not kept and patience[id(stream)] == 0:
                    stream.close()  # type: ignore[attr-defined]  # it is a generator
                    streams.remove(entry)
                elif not kept:
                    patience[id(stream)] -= 1
        assert not llm.core.has_unfinished
        records = not eager and llm.core.blueprint.platform.graph_engine().max_graphs != 0
        assert (llm.metrics.value("hardpoint_graph_replays_total") > 0) is records
        if tight:
            assert preemptions > 0, "the pool is meant to be too small"
