"""The cache leaves the memory that the largest steps take."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import CapacityError
from tests.support.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    write_checkpoint(folder, "llama", num_hidden_layers=1, intermediate_size=40_000, max_position_embeddings=65_536)
    return folder


def engine(folder: Path, memory_mib: int, **settings: int) -> LLM:
    return LLM(str(folder), platform="sim", plugin_config={"sim": {"memory_mib": memory_mib}}, **settings)


def test_the_largest_step_fits_beside_a_cache_that_takes_the_rest(checkpoint: Path) -> None:
    with engine(checkpoint, 420) as llm:
        assert llm.memory_report().by_tag["kv"] > 30 << 20
        prompts = [[3 + (i * 7 + j) % 90 for j in range(32)] for i in range(8)]  # one step's
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * 8


def test_a_step_that_does_not_fit_at_all_names_the_flag(checkpoint: Path) -> None:
    with pytest.raises(CapacityError, match=r"a step of 256 tokens does not fit .* lower --max-num-batched-tokens"):
        engine(checkpoint, 140)
    gc.collect()  # the error's frames hold the weights
