"""Every topology over processes: Transformers' greedy tokens, though prompts are cut, cached, preempted and aborted."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint_plugin_api import EngineDeadError
from tests.support.checkpoints import DEEPSEEK_V2, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm, until
from tests.support.processes import engine_processes, is_gone, is_rank

pytestmark = pytest.mark.nightly

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v2": DEEPSEEK_V2,
}
TENSORS, STAGES, REPLICAS = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
WHOLE_EXPERTS: dict[str, Any] = {"enable_expert_parallel": True}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp2": {TENSORS: 2},
    "pp2": {STAGES: 2},
    "pp3-uneven": {STAGES: 3},
    "dp2": {REPLICAS: 2},
    "ep4": {TENSORS: 4} | WHOLE_EXPERTS,
    "tp2-pp2": {TENSORS: 2, STAGES: 2},
    "ep2-pp2": {TENSORS: 2, STAGES: 2} | WHOLE_EXPERTS,
    "pp2-dp2": {STAGES: 2, REPLICAS: 2},
    "ep2-dp2": {TENSORS: 2, REPLICAS: 2, "expert_parallel_size": 2} | WHOLE_EXPERTS,
    "ep4-dp2": {TENSORS: 2, REPLICAS: 2} | WHOLE_EXPERTS,
    "ep2-pp2-dp2": {STAGES: 2, REPLICAS: 2} | WHOLE_EXPERTS,
}
CASES = [
    (topology, family)
    for topology, sizes in TOPOLOGIES.items()
    for family in MODELS
    if family != "qwen3" or not WHOLE_EXPERTS.items() <= sizes.items()
]
PAGES = 8
"""Pages of each replica's cache: three requests of up to 84 tokens each need more, one takes six."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Checkpoints of four blocks by family; written once."""
    found = {}
    for family, changes in MODELS.items():
        folder = tmp_path_factory.mktemp(family)
        found[family] = folder, write_checkpoint(folder, family, num_hidden_layers=4, **changes)
    return found


@cache
def bytes_of_pages(folder: Path, topology: str) -> int:
    """Bytes of a cache that has PAGES pages on the stage that has most layers."""
    sizes = TOPOLOGIES[topology]
    with small_llm(folder, **(sizes | {"kv_cache_memory": "1MiB"})) as llm:
        pages: int = llm.stats.num_pages // sizes.get(REPLICAS, 1)
    return PAGES * (2**20 // pages)


@pytest.mark.parametrize("ahead", [False, True], ids=["depth 0", "ahead"])
@pytest.mark.parametrize(("topology", "family"), CASES)
def test_tokens(topology: str, family: str, ahead: bool, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, model = models[family]
    settings = {"async_scheduling": ahead, "max_num_batched_tokens": 32}
    prompts = random_prompts(6, 60, seed=1)
    with small_llm(folder, **TOPOLOGIES[topology], **settings, kv_cache_memory=bytes_of_pages(folder, topology)) as llm:
        for _ in range(2):
            stream = llm.stream(prompts[0], ENDLESS)
            next(stream)
            del stream  # aborts the request
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert llm.stats.cached_tokens > 0
        assert llm.stats.num_preemptions > 0


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("topology", ["tp2-pp2", "ep4"])
def test_a_rank_that_is_killed(topology: str, victim: int, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    """Every request says so, and every process ends."""
    with small_llm(models["qwen3_moe"][0], **TOPOLOGIES[topology], core_process=True) as llm:
        started = engine_processes(os.getpid())
        ranks = [pid for pid in started if is_rank(pid)]
        assert len(ranks) == 4
        streams = [llm.stream([number], ENDLESS) for number in range(4)]
        for stream in streams:
            next(stream)
        os.kill(ranks[victim], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=rf"rank \d \({ranks[victim]}\) was ended by SIGKILL"):
                list(stream)
        until(lambda: all(map(is_gone, started)))
