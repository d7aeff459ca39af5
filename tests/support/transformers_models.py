"""A tiny random checkpoint of any causal language model that Transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from hardpoint.conformance.families.model_samples import random_model
from hardpoint.structured.bytes import VOCABULARY
from tests.support.checkpoints import write_tokenizer

_KEYS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embed_dim": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": None,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 9,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
"""Config keys of a tiny model, by the names that models have for them; each gets those that it knows."""

CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "cwm": {"bos_token_id": 1},
    "falcon": {"alibi": False},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ["global", "local"] * 2,
        "num_layers": 4,
        "num_hidden_layers": 4,
        "window_size": 9,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0},
    "llama4_text": {"attention_chunk_size": 16, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "modernbert-decoder": {"pad_token_id": 1, "bos_token_id": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""Keys of single model types."""


_MOST_PARAMETERS = 20_000_000


class TooLargeError(Exception):
    """The keys above leave a model of this type large."""


def causal_kinds() -> dict[str, str]:
    """The model types that have a causal language model of their own, and its class."""
    found: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if kind in CONFIG_MAPPING and (name not in found or kind.endswith("_text")):  # the latter: of that part alone
            found[name] = kind
    return {kind: name for name, kind in found.items()}


def write_tiny(folder: Path, kind: str, **changes: Any) -> PreTrainedModel:
    """Write a random model of this type to ``folder`` and return it. ``changes`` override config keys."""
    config = CONFIG_MAPPING[kind]
    known = set(config().to_dict()) | set(config.attribute_map)
    keys = {key: value for key, value in _KEYS.items() if key in known}
    if "kv_lora_rank" in known:  # heads share no keys; a head's size is that of the part that rotates
        keys |= {"num_key_value_heads": 4, "head_dim": 8}
    keys |= CHANGES.get(kind, {}) | changes
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config(**keys)).num_parameters()
    if size > _MOST_PARAMETERS:
        raise TooLargeError(f"its config has sizes of other names: {size:,} parameters")
    model = random_model(config(**keys), seed=0)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model
