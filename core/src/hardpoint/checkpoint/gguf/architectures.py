"""The names of GGUF's architectures in Hugging Face's format: classes, config keys, tensors.

Names: ``gguf-py/gguf/constants.py`` of https://github.com/ggml-org/llama.cpp; what its conversion changes of a
checkpoint: ``conversion/*.py`` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.checkpoint.gguf.changes import EXPONENTIAL, FLAT_FILTER, UNCHANGED, Change
from hardpoint.checkpoint.gguf.derived import Derive, deepseek2, gemma3, glm4_moe, gpt_oss, qwen3_next
from hardpoint_plugin_api import CheckpointError, UnknownNameError

KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Metadata key behind the architecture's name -> key of config.json, for all architectures."""

_ATTENTION = {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DENSE = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {f"ffn_{x}_exps": f"mlp.experts.*.{x}_proj" for x in ("gate", "up", "down")}
_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
_SHARED_EXPERTS = {f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}
_DEEPSEEK = _LATENT | _NORMS | _DENSE | _EXPERTS | _SHARED_EXPERTS
_DEEPSEEK_KEYS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DELTA_NET = {
    "ssm_a": "linear_attn.A_log",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of early files, which have not divided it
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    ``modules``: module within a block -> module within a layer of Hugging Face's checkpoint; ``*`` stands for the
    number of an expert, all of which GGUF has in one tensor. ``keys``: config keys beyond ``KEYS``. ``constants``: keys
    that GGUF does not hold. ``permuted``: rows of q and k are in the order of llama.cpp's rotary embedding, which
    pairs neighbours. ``norms_plus_one``: weights of norms have one added. ``wide_queries``: the number of layers at
    which attention divides by the root of hidden size / heads and not of the head size, for Gemma. ``bare``: modules
    that are one tensor in Hugging Face's checkpoint, without a name behind the module's. ``changes``: modules whose
    numbers or shape are others. ``turned``: the module that both ``attn_qkv`` and ``attn_gate`` are in, whose rows take
    turns, key head by key head. ``derive``: see derived.py.
    """

    hf_class: str
    modules: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    norms_plus_one: bool = False
    wide_queries: int | None = None
    bare: frozenset[str] = frozenset()
    changes: Mapping[str, Change] = field(default_factory=dict)
    turned: str | None = None
    derive: Derive | None = None


_LLAMA = _ATTENTION | _NORMS | _DENSE

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _LLAMA, permuted=True),
    "llama, experts": Architecture(
        "MixtralForCausalLM", _ATTENTION | _NORMS | _MIXTRAL, _EXPERT_KEYS, {"sliding_window": None}, permuted=True
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", _LLAMA, permuted=True),
    "granite": Architecture(
        "GraniteForCausalLM",
        _LLAMA,
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        permuted=True,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA),
    "qwen2moe, experts": Architecture(
        "Qwen2MoeForCausalLM",
        _ATTENTION | _NORMS | _EXPERTS | _SHARED_EXPERT,
        _EXPERT_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", _LLAMA | _HEAD_NORMS),
    "qwen3moe, experts": Architecture(
        "Qwen3MoeForCausalLM",
        _ATTENTION | _NORMS | _EXPERTS | _HEAD_NORMS,
        _EXPERT_KEYS,
        {"norm_topk_prob": True},
    ),
    "qwen3next, experts": Architecture(
        "Qwen3NextForCausalLM",
        _ATTENTION
        | _HEAD_NORMS
        | _EXPERTS
        | _SHARED_EXPERT
        | _DELTA_NET
        | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        _EXPERT_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": True},
        norms_plus_one=True,
        bare=frozenset({"ssm_a", "ssm_dt"}),
        changes={"ssm_a": EXPONENTIAL, "ssm_conv1d": FLAT_FILTER, "ssm_norm": UNCHANGED},
        turned="linear_attn.in_proj_qkvz",
        derive=qwen3_next,
    ),
    "deepseek2, experts": Architecture("DeepseekV2ForCausalLM", _DEEPSEEK, _DEEPSEEK_KEYS, derive=deepseek2),
    "deepseek2, experts by sigmoid": Architecture(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK | {"exp_probs_b": "mlp.gate.e_score_correction_bias"},
        _DEEPSEEK_KEYS,
        bare=frozenset({"exp_probs_b"}),
        derive=deepseek2,
    ),
    "glm4moe, experts by sigmoid": Architecture(
        "Glm4MoeForCausalLM",
        _ATTENTION
        | _HEAD_NORMS
        | _DENSE
        | _EXPERTS
        | _SHARED_EXPERTS
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        _DEEPSEEK_KEYS,
        bare=frozenset({"exp_probs_b"}),
        derive=glm4_moe,
    ),
    "gpt-oss, experts": Architecture(
        "GptOssForCausalLM",
        _ATTENTION
        | _EXPERTS
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window",
        },
        bare=frozenset({"attn_sinks"}),
        derive=gpt_oss,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        {"attention.sliding_window": "sliding_window"},
    ),
    "gemma": Architecture("GemmaForCausalLM", _LLAMA, norms_plus_one=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", _ATTENTION | _SANDWICH | _DENSE, _CAPS, norms_plus_one=True, wide_queries=46
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _ATTENTION | _SANDWICH | _DENSE | _HEAD_NORMS,
        _CAPS,
        norms_plus_one=True,
        wide_queries=62,
        derive=gemma3,
    ),
}
"""By ``general.architecture``, with ``, experts`` behind it where the model has experts, and ``by sigmoid`` where it
scores them so."""
_SIGMOID = 2
"""The number of that scoring function."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules outside of blocks."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = ("rope_freqs.weight", LONG_FACTORS, SHORT_FACTORS)
"""Tensors that are settings of the rotary embedding, and no weights."""


def architecture_of(metadata: Mapping[str, Any], file: object) -> Architecture:
    """The entry of the model in ``file``. Raises UnknownNameError for one that is not here; CheckpointError."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file}: general.architecture must be a text, got {name!r:.80}; is it a model's file?")
    key = f"{name}, experts" if metadata.get(f"{name}.expert_count") else name
    if metadata.get(f"{name}.expert_gating_func") == _SIGMOID:
        key += " by sigmoid"
    if key not in ARCHITECTURES:
        if any(other.startswith(f"{name}, experts") for other in ARCHITECTURES):
            raise CheckpointError(f"{file}: {name}.expert_count is missing or 0; {name} is read with experts alone")
        known = sorted({each.partition(",")[0] for each in ARCHITECTURES})
        raise UnknownNameError("GGUF architecture", key, known, f"It stands in {file}.")
    return ARCHITECTURES[key]
