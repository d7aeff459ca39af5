"""``--load-format random``: a model of the config's shape, the same for a seed, without a weight on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hardpoint import SamplingParams
from hardpoint_plugin_api import CheckpointError
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {"tie_word_embeddings": True}), ("qwen3_moe", {}), ("mixtral", {})],
    ids=["llama", "tied", "qwen3_moe", "mixtral"],
)
def test_a_config_is_enough(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, family, **changes)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    drawn = []
    for seed in (1, 1, 2):
        with small_llm(tmp_path, load_format="random", seed=seed) as llm:
            drawn.append(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
            llm.sleep(2)
            llm.wake_up()
            assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == drawn[-1]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_quantized_checkpoint_has_no_random_form(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no random weights can be made .* its weights are quantized"):
        small_llm(tmp_path, load_format="random")
