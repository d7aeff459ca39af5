"""The language models of Mistral Small 3.1 and Ministral 3, as checkpoints with a vision tower have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedModel

from hardpoint.conformance.families.model_samples import TINY
from hardpoint_plugin_api import CheckpointError, UnknownNameError
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint, write_tokenizer
from tests.support.engines import prompt_logits, small_llm

VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VISION |= {"head_dim": 8, "image_size": 28, "patch_size": 14}


def write_with_vision_tower(folder: Path, text: str, tied: bool = False, **changes: Any) -> PreTrainedModel:
    config = Mistral3Config(
        text_config=TINY | {"model_type": text} | changes,
        vision_config={"model_type": "pixtral"} | VISION,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@pytest.mark.parametrize("text", ["mistral", "ministral3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_is_served(text: str, tied: bool, tmp_path: Path) -> None:
    model = write_with_vision_tower(tmp_path, text, tied, sliding_window=13)
    names = load_file(tmp_path / "model.safetensors")
    assert {name.partition(".")[0] for name in names} == {"language_model", "vision_tower", "multi_modal_projector"}
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def test_what_a_config_of_ministral_3_leaves_out(tmp_path: Path) -> None:
    """Rotary parameters are then Transformers' own: YaRN, and queries that grow."""
    model = write_checkpoint(tmp_path, "ministral3", rope_parameters=None)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("rope_parameters")["llama_4_scaling_beta"] == 0.1
    path.write_text(json.dumps(config))
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def test_configs_that_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "ministral3")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["llama_4_scaling_beta"] = -1.0
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'llama_4_scaling_beta' must be a number above 0"):
        small_llm(tmp_path)
    config |= {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral5"}}
    path.write_text(json.dumps(config))
    with pytest.raises(UnknownNameError, match="language model 'mistral5'"):
        small_llm(tmp_path)
