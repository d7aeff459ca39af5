"""A cache that fills the device leaves what sampling takes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from hardpoint import SamplingParams
from hardpoint_plugin_api import CapacityError
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm

VOCABULARY, NUM_REQUESTS, MEMORY_MIB = 40_000, 16, 256
MIB = 2**20
SETTINGS: dict[str, Any] = {
    "platform": "sim",
    "plugin_config": {"sim": {"memory_mib": MEMORY_MIB}},
    "kv_cache_memory": None,
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 64,
    "max_model_len": 8192,
    "enforce_eager": True,
}
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    seed=1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={5: 1.0},
    bad_words=["the"],
    allowed_token_ids=list(range(1000)),
    logprobs=20,
    max_tokens=4,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_checkpoint(folder, "llama", vocab_size=VOCABULARY, max_position_embeddings=8192)
    return folder


@pytest.mark.parametrize("drafts", [0, 2])
def test_all_requests_sample_by_every_setting_beside_a_cache_that_fills_the_device(folder: Path, drafts: int) -> None:
    speculation = {"speculative_method": "ngram", "num_speculative_tokens": drafts} if drafts else {}
    prompts = [[i, 7, 8, 9] * 5 for i in range(NUM_REQUESTS)]  # in which drafts are found
    with small_llm(folder, **SETTINGS, **speculation) as llm:
        report = llm.memory_report()
        logits = NUM_REQUESTS * (1 + drafts) * VOCABULARY * 4
        assert report.device.free > 4 * logits, "sampling holds several tensors as large as logits"
        assert report.by_tag["kv"] > MEMORY_MIB * MIB / 4, "and it is not idle memory that the cache had no use for"
        outputs = llm.generate(prompts, EVERYTHING, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * NUM_REQUESTS


def test_a_cache_of_all_that_is_free_is_refused(folder: Path) -> None:
    with small_llm(folder, **SETTINGS) as llm:
        report = llm.memory_report()
        room = report.by_tag["kv"] + report.device.free
    with pytest.raises(CapacityError, match=r"of which sampling takes [\d,]+; lower --kv-cache-memory"):
        small_llm(folder, **SETTINGS | {"kv_cache_memory": room})
    gc.collect()  # the error's frames hold the weights


def test_requests_that_cannot_be_sampled_at_once_are_refused_at_the_start(folder: Path) -> None:
    many = {"max_num_seqs": 256, "max_num_batched_tokens": 256}  # whose logits alone take 39 MiB
    with pytest.raises(CapacityError, match=r"sampling for 256 requests does not fit .*; lower --max-num-seqs"):
        small_llm(folder, **SETTINGS | many)
    gc.collect()
