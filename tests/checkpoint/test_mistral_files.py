"""Mistral's own files, params.json and consolidated.safetensors, against Transformers' run of the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hardpoint_plugin_api import CheckpointError
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as Mistral has them: elements that rotate together are neighbours."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_consolidated(folder: Path, model: PreTrainedModel, **params: object) -> None:
    config, tensors = model.config, {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    ends = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in ends:
            tensors[f"{ends[module]}.weight"] = tensor.contiguous()
            continue
        _, _, number, inner = module.split(".", 3)
        count = heads.get(inner.rpartition(".")[2])
        value = tensor if count is None else in_pairs(tensor, count)
        tensors[f"layers.{number}.{NAMES[inner]}.weight"] = value.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "consolidated.safetensors")
    found = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    (folder / "params.json").write_text(json.dumps(found | params))


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_logits(impl: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hugging_face", "mistral", sliding_window=None)
    write_consolidated(tmp_path / "own", model)
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path / "own", max_model_len=128, skip_tokenizer_init=True, model_impl=impl) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hugging_face", "mistral")
    write_consolidated(tmp_path / "own", model, moe={"num_experts": 8, "num_experts_per_tok": 2})
    with pytest.raises(CheckpointError, match=r"params.json: moe is not read .* Hugging Face's format"):
        small_llm(tmp_path / "own", skip_tokenizer_init=True)
