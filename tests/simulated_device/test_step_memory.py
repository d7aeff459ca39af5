"""The cache leaves the memory that the largest steps take."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.memory.step_memory import StepMemory
from hardpoint_plugin_api import CapacityError
from tests.parallel.ranks import ranks_in_threads
from tests.support.checkpoints import write_checkpoint

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    write_checkpoint(folder, "llama", num_hidden_layers=1, intermediate_size=40_000, max_position_embeddings=65_536)
    return folder


def engine(folder: Path, memory_mib: int, **settings: Any) -> LLM:
    return LLM(str(folder), platform="sim", plugin_config={"sim": {"memory_mib": memory_mib}}, **settings)


def test_the_largest_step_fits_beside_a_cache_that_takes_the_rest(checkpoint: Path) -> None:
    with engine(checkpoint, 420, max_model_len=4096) as llm:
        assert llm.memory_report().by_tag["kv"] > 30 << 20
        prompts = [[3 + (i * 7 + j) % 90 for j in range(32)] for i in range(8)]  # one step's
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * 8


def test_a_step_that_does_not_fit_at_all_names_the_flag(checkpoint: Path) -> None:
    with pytest.raises(CapacityError, match=r"a step of 256 tokens does not fit .* lower --max-num-batched-tokens"):
        engine(checkpoint, 140)
    gc.collect()  # the error's frames hold the weights


def test_scratch_memory_that_grows_with_the_sequence_fits_beside_the_cache(tmp_path: Path) -> None:
    """The reference's scores: queries times keys."""
    write_checkpoint(tmp_path, "llama", max_position_embeddings=65_536)
    settings = {"attention_backend": "reference", "max_num_batched_tokens": 1024}
    with engine(tmp_path, 600, max_model_len=4096, **settings) as llm:
        assert llm.memory_report().by_tag["kv"] > 30 << 20
        (output,) = llm.generate([[3 + i % 90 for i in range(4094)]], ONE, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1
    fault = r"tokens at the end of a sequence of 65536 does not fit .* lower --max-model-len or --max-num-batched"
    with pytest.raises(CapacityError, match=fault):
        engine(tmp_path, 600, **settings)
    gc.collect()


def test_a_rank_without_memory_for_a_trial_step_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it in a collective of that step."""
    write_checkpoint(tmp_path, "llama")
    run = StepMemory._run

    def failing(steps: StepMemory, *args: Any) -> Any:
        if steps.ctx.parallel.tp.rank == 1:
            raise torch.OutOfMemoryError("planted")
        return run(steps, *args)

    monkeypatch.setattr(StepMemory, "_run", failing)
    settings: dict[str, Any] = {"platform": "sim", "plugin_config": {}}
    settings |= {"kv_cache_memory": None, "core_start_timeout": 60}
    with (
        pytest.raises(CapacityError, match=r"a step of \d+ tokens does not fit .*: planted; lower --max-num-batched"),
        ranks_in_threads(tmp_path, 2, **settings),
    ):
        pass
