"""Settings of config.json that follow from several of a GGUF file, by architecture.

Each function takes the file's values by their keys behind the architecture's name, and the names of its tensors. It
changes the config that was made of the values one by one. Sources: ``conversion/deepseek.py``, ``conversion/glm.py``,
``conversion/gemma.py``, ``src/models/deepseek2.cpp``, ``src/models/gemma3.cpp`` and ``src/models/openai-moe.cpp`` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

Derive = Callable[[Mapping[str, Any], Container[str], dict[str, Any]], None]


def deepseek2(given: Mapping[str, Any], tensors: Container[str], config: dict[str, Any]) -> None:
    """DeepSeek-V2 and V3: attention is latent, whose sizes the file has as those of one head of keys and values.

    Files from before that have the sizes of a head. A file that says nothing of groups of experts has none.
    """
    config.pop("head_dim", None)
    config.pop("partial_rotary_factor", None)
    size, rotary = given.get("attention.key_length_mla", given.get("attention.key_length")), "rope.dimension_count"
    if type(size) is int and type(given.get(rotary)) is int:
        config |= {"qk_rope_head_dim": given[rotary], "qk_nope_head_dim": size - given[rotary]}
    config["v_head_dim"] = given.get("attention.value_length_mla", given.get("attention.value_length"))
    config["q_lora_rank"] = given.get("attention.q_lora_rank")
    config["num_key_value_heads"] = config.get("num_attention_heads")
    _routed(given, config)
    if config["architectures"] == ["DeepseekV2ForCausalLM"]:
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    multiplier, scaling = given.get("rope.scaling.yarn_log_multiplier"), config.get("rope_scaling")
    if scaling is not None and multiplier:
        weight = round(10 * multiplier, 6)  # the file has a tenth of it
        scaling |= {"mscale": weight, "mscale_all_dim": weight}


def gemma3(given: Mapping[str, Any], tensors: Container[str], config: dict[str, Any]) -> None:
    """Gemma 3: a file of a model whose layers all attend to all tokens has no window (``sliding_window_pattern`` 1).

    Layers with a window rotate by a theta of their own. Which they are is a period, or a flag for each layer.
    """
    config["rope_local_base_freq"] = given.get("rope.freq_base_swa", 10_000.0)
    layers, pattern = config.get("num_hidden_layers"), given.get("attention.sliding_window_pattern")
    if config.get("sliding_window") is None and type(layers) is int:
        config["layer_types"] = ["full_attention"] * layers
    elif isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern


def gpt_oss(given: Mapping[str, Any], tensors: Container[str], config: dict[str, Any]) -> None:
    """gpt-oss: every other layer has a window, and YaRN's borders are not rounded, as in OpenAI's own code."""
    layers = config.get("num_hidden_layers")
    if type(layers) is int:
        config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    config["intermediate_size"] = given.get("expert_feed_forward_length", config.get("intermediate_size"))
    if (scaling := config.get("rope_scaling")) is not None:
        scaling["truncate"] = False


def glm4_moe(given: Mapping[str, Any], tensors: Container[str], config: dict[str, Any]) -> None:
    """GLM-4.5 to 4.7: queries, keys and values have biases, and the larger models norms of heads."""
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    _routed(given, config)


def qwen3_next(given: Mapping[str, Any], tensors: Container[str], config: dict[str, Any]) -> None:
    """Qwen3-Next: sizes of its gated delta nets are those that the file has of states, and layers are of two kinds."""
    heads, inner = given.get("ssm.time_step_rank"), given.get("ssm.inner_size")
    config |= {"linear_num_value_heads": heads, "linear_num_key_heads": given.get("ssm.group_count")}
    config |= {
        "linear_key_head_dim": given.get("ssm.state_size"),
        "linear_conv_kernel_dim": given.get("ssm.conv_kernel"),
    }
    if type(heads) is int and type(inner) is int and heads > 0:
        config["linear_value_head_dim"] = inner // heads
    config["full_attention_interval"] = given.get("full_attention_interval", 4)
    further = config["num_nextn_predict_layers"] = given.get("nextn_predict_layers", 0)
    if type(config.get("num_hidden_layers")) is int and type(further) is int:
        config["num_hidden_layers"] -= further
    if isinstance(recurrent := given.get("attention.recurrent_layers"), list):
        kinds = ["linear_attention" if one else "full_attention" for one in recurrent]
        config["layer_types"] = kinds[: config["num_hidden_layers"]]


def _routed(given: Mapping[str, Any], config: dict[str, Any]) -> None:
    """DeepSeek's router, and the layers behind the last one that predict further tokens."""
    config["n_group"] = given.get("expert_group_count") or 1
    config["topk_group"] = given.get("expert_group_used_count") or 1
    config["norm_topk_prob"] = given.get("expert_weights_norm", False)
    config["routed_scaling_factor"] = given.get("expert_weights_scale", 1.0)
    further = config["num_nextn_predict_layers"] = given.get("nextn_predict_layers", 0)
    if type(config.get("num_hidden_layers")) is int and type(further) is int:
        config["num_hidden_layers"] -= further
