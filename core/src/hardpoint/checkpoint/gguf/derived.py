"""Settings of config.json that follow from several of a GGUF file, by architecture.

Each function takes the file's values by their keys behind the architecture's name, and changes the config that was made
of them one by one. Sources: ``conversion/deepseek.py``, ``src/models/deepseek2.cpp`` and ``src/models/openai-moe.cpp``
of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def deepseek2(given: Mapping[str, Any], config: dict[str, Any]) -> None:
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
    groups, best = given.get("expert_group_count") or 1, given.get("expert_group_used_count") or 1
    config |= {"n_group": groups, "topk_group": best}
    config["norm_topk_prob"] = given.get("expert_weights_norm", False)
    config["routed_scaling_factor"] = given.get("expert_weights_scale", 1.0)
    if config["architectures"] == ["DeepseekV2ForCausalLM"]:
        config["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    further = given.get("nextn_predict_layers", 0)
    config["num_nextn_predict_layers"] = further
    if type(config.get("num_hidden_layers")) is int and type(further) is int:
        config["num_hidden_layers"] -= further
    multiplier, scaling = given.get("rope.scaling.yarn_log_multiplier"), config.get("rope_scaling")
    if scaling is not None and multiplier:
        weight = round(10 * multiplier, 6)  # the file has a tenth of it
        scaling |= {"mscale": weight, "mscale_all_dim": weight}


def gpt_oss(given: Mapping[str, Any], config: dict[str, Any]) -> None:
    """gpt-oss: every other layer has a window, and YaRN's borders are not rounded, as in OpenAI's own code."""
    layers = config.get("num_hidden_layers")
    if type(layers) is int:
        config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    config["intermediate_size"] = given.get("expert_feed_forward_length", config.get("intermediate_size"))
    if (scaling := config.get("rope_scaling")) is not None:
        scaling["truncate"] = False
