"""Checkpoints that store a head although their config ties it to the embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3ForConditionalGeneration

from hardpoint_plugin_api import CheckpointError
from tests.models.test_mistral3 import write_with_vision_tower
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_head_of_its_own_is_refused_and_the_remedy_helps(tmp_path: Path) -> None:
    """As Transformers 5 saves Mistral Small 3.1: the outer config ties, the inner does not, and there is a head."""
    write_with_vision_tower(tmp_path, "mistral", tied=False, sliding_window=None)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (prompt,) = random_prompts(1, 40, seed=1, shortest=40)
    expected = reference_logits(Mistral3ForConditionalGeneration.from_pretrained(tmp_path).eval(), prompt)
    with pytest.raises(CheckpointError, match=r'language_model\.lm_head\.weight.*"tie_word_embeddings": false'):
        small_llm(tmp_path)
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_an_equal_head_is_read_and_another_refused(impl: str, tmp_path: Path) -> None:
    """From files, and from given tensors, in either order."""
    model = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    head = stored[EMBEDDING].clone()
    save_file(stored | {HEAD: head}, path, {"format": "pt"})
    (prompt,) = random_prompts(1, 40, seed=1, shortest=40)
    with small_llm(tmp_path, model_impl=impl) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4
        llm.update_weights([(HEAD, head), *stored.items()])
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4
        for other in (head + 1, torch.cat([head, head])):
            for tensors in ([(HEAD, other), *stored.items()], [*stored.items(), (HEAD, other)]):
                with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differ"):
                    llm.update_weights(tensors)
    save_file(stored | {HEAD: head + 1}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*differ.* or remove the head"):
        small_llm(tmp_path, model_impl=impl)
