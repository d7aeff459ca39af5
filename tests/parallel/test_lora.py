"""LoRA adapters over several ranks: each reads its share of the matrices, and tokens are those of merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LoRARequest, SamplingParams
from hardpoint.engine.control import LoadAdapter
from hardpoint_plugin_api import CheckpointError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm
from tests.support.lora import ATTENTION, write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
WORLDS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "fewer key heads than ranks": {"tensor_parallel_size": 2, "num_key_value_heads": 1},
    "two stages": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize(
    "world", ["two ranks", *(pytest.param(name, marks=pytest.mark.nightly) for name in list(WORLDS)[1:])]
)
def test_every_rank_reads_its_share(tmp_path: Path, world: str) -> None:
    settings = dict(WORLDS[world])
    changes = {key: settings.pop(key) for key in tuple(settings) if key.startswith("num_")}
    models = {"": write_checkpoint(tmp_path, "llama", **changes)}
    models["all"] = write_adapter(tmp_path / "all", models[""])
    models["attention"] = write_adapter(tmp_path / "attention", models[""], targets=ATTENTION, rank=8, seed=2)
    write_adapter(tmp_path / "head", models[""], targets=("lm_head",))
    bad = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    write_adapter(tmp_path / "bad", models[""], tensors={bad: torch.full((4, 64), torch.nan)})
    names, prompts = ["", "all", "attention", "all"], random_prompts(4, 30, seed=1)
    requests = [LoRARequest(name, 1, str(tmp_path / name)) if name else None for name in names]
    with small_llm(tmp_path, enable_lora=True, max_loras=2, max_lora_rank=8, **settings) as llm:
        with pytest.raises(CheckpointError, match="lm_head"):
            llm.control(LoadAdapter("head", str(tmp_path / "head")))
        with pytest.raises(CheckpointError, match="not finite"):
            llm.control(LoadAdapter("bad", str(tmp_path / "bad")))
        llm.control(LoadAdapter("attention", str(tmp_path / "attention")))  # into the slot that was filled in part
        outputs = llm.generate(prompts, GREEDY, lora_request=requests)
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        check_tokens_equal(models[name], prompt, output.outputs[0].token_ids)
