"""Mistral 7B and its kin (Jiang et al. 2023, arXiv:2310.06825), Ministral 8B (Mistral AI 2024), and Ministral 3
(mistralai/Ministral-3-8B-Base-2512)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import (
    Block,
    attention,
    decoder,
    layer_types,
    mlp,
    norms,
    num_layers,
    part_named,
    sliding_window,
)
from hardpoint_plugin_api import CheckpointError, QueryScalingArgs, UnknownNameError

_ROPE_OF_MINISTRAL_3: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""For configs that leave it out; Transformers' default."""


def mistral(config: HFConfig) -> CausalLMArgs:
    """Every layer has the same sliding window, the query's own token included; null means full attention."""
    block = Block(attention(config, window=sliding_window(config)), mlp(config), norms(config))
    return decoder(config, [block] * num_layers(config))


def ministral(config: HFConfig) -> CausalLMArgs:
    """Layers with a sliding window and layers without, as ``layer_types`` has it; without that key all have one."""
    window = sliding_window(config)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = layer_types(config, [default] * num_layers(config))
    dense, norm = mlp(config), norms(config)
    mixers = (attention(config, window=window if kind == "sliding_attention" else None) for kind in kinds)
    return decoder(config, [Block(mixer, dense, norm) for mixer in mixers])


def ministral3(config: HFConfig) -> CausalLMArgs:
    """Mistral in which queries grow with their position, beyond the length that YaRN extends."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = replace(config, data={**config.data, "rope_parameters": _ROPE_OF_MINISTRAL_3})
    mixer = attention(config, window=config.get("sliding_window"), query_scaling=_query_scaling(config))
    return decoder(config, [Block(mixer, mlp(config), norms(config, 1e-5))] * num_layers(config))


def mistral3(config: HFConfig) -> CausalLMArgs:
    """The language model of Mistral Small 3.1 and its kin, and of Ministral 3; the vision tower is left out."""
    text = config.text
    kind = str(text.get("model_type", "mistral"))
    if kind not in _LANGUAGE_MODELS:
        raise UnknownNameError("language model", kind, _LANGUAGE_MODELS, f"It stands in {config.path}.")
    model = _LANGUAGE_MODELS[kind](text)
    return part_named(model, "language_model", other_parts=("vision_tower", "multi_modal_projector"))


_LANGUAGE_MODELS: dict[str, Callable[[HFConfig], CausalLMArgs]] = {
    "mistral": mistral,
    "ministral": ministral,
    "ministral3": ministral3,
}


def _query_scaling(config: HFConfig) -> QueryScalingArgs | None:
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling")
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta:
        return None
    if type(beta) not in (int, float) or beta < 0 or type(length) is not int or length < 1:
        raise CheckpointError(
            f"{config.path}: 'llama_4_scaling_beta' must be a number above 0 beside the whole number "
            f"'original_max_position_embeddings', got {beta!r} and {length!r}"
        )
    return QueryScalingArgs(length, float(beta))
