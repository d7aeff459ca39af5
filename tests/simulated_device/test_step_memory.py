"""The cache leaves the memory that the largest steps take."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.memory.step_memory import StepMemory
from hardpoint.layers.moe import Experts
from hardpoint_plugin_api import CapacityError
from tests.parallel.ranks import ranks_in_threads, sharing_replicas
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


def test_trial_steps_bring_all_tokens_to_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that share experts send padding to none, and what a step without any takes would be too little."""
    changes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_checkpoint(tmp_path, "qwen3_moe", **changes)
    run, forward = StepMemory._run, Experts.forward
    trials, sent = threading.local(), list[tuple[int, int]]()

    def trying(steps: StepMemory, *args: Any) -> Any:
        trials.are_run = True
        try:
            return run(steps, *args)
        finally:
            trials.are_run = False

    def noting(experts: Experts, x: torch.Tensor, ids: torch.Tensor, *others: Any) -> torch.Tensor:
        if getattr(trials, "are_run", False):
            sent.append((len(ids), int((ids.cpu() >= 0).all(1).sum())))
        return forward(experts, x, ids, *others)

    monkeypatch.setattr(StepMemory, "_run", trying)
    monkeypatch.setattr(Experts, "forward", noting)
    settings: dict[str, Any] = {"platform": "sim", "plugin_config": {}, "kv_cache_memory": None}
    with sharing_replicas(tmp_path, **settings):
        pass
    assert max(sent)[0] >= 128
    assert all(tokens == with_experts for tokens, with_experts in sent), sent
