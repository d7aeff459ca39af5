"""Granite 4's hybrids of Mamba-2 and attention (IBM 2025), with or without mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, adjusted, attention, decoder, linear_names, norms, num_layers
from hardpoint.models.mamba2 import bamba_mixer
from hardpoint.models.mixture import moe_args
from hardpoint.ops.activation import activation_of_hf
from hardpoint_plugin_api import AttentionArgs, CheckpointError, MLPArgs

_TODAY = {"mamba": "linear_attention", "attention": "full_attention"}


def granite_hybrid(config: HFConfig) -> CausalLMArgs:
    """Layers by ``layer_types``, with Granite's multipliers: of embeddings, scores, results of sub-layers, logits."""
    kinds, multiplier = _kinds(config), config.number("residual_multiplier", 1.0)
    mixers: dict[str, Sublayer[Any]] = {
        "linear_attention": adjusted(bamba_mixer(config), multiplier=multiplier),
        "full_attention": adjusted(_attention(config), multiplier=multiplier),
    }
    feed_forward = adjusted(_feed_forward(config), multiplier=multiplier)
    return replace(
        decoder(config, [Block(mixers[kind], feed_forward, norms(config)) for kind in kinds]),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / config.number("logits_scaling", 1.0),
    )


def _kinds(config: HFConfig) -> tuple[str, ...]:
    """``linear_attention`` or ``full_attention`` for each layer; older configs say mamba and attention."""
    count = num_layers(config)
    types = config.get("layer_types", ["linear_attention"] * count)
    kinds = [_TODAY.get(str(kind), str(kind)) for kind in types] if isinstance(types, list) else []
    if len(kinds) != count or any(kind not in _TODAY.values() for kind in kinds):
        raise CheckpointError(
            f"{config.path}: 'layer_types' must name {count} layers, each linear_attention or full_attention, "
            f"got {types!r}"
        )
    return tuple(kinds)


def _attention(config: HFConfig) -> Sublayer[AttentionArgs]:
    """Rotated where ``position_embedding_type`` says so; Mamba layers know positions without."""
    bias = config.flag("attention_bias", False)
    found = attention(config, qkv_bias=bias, out_bias=bias, scale=config.number("attention_multiplier", 1.0))
    if config.get("position_embedding_type") == "rope":
        return found
    return replace(found, args=replace(found.args, rope=None))


def _feed_forward(config: HFConfig) -> Sublayer[Any]:
    """A feed-forward that every token passes; beside it a mixture, unless ``num_local_experts`` is 0."""
    width = config.integer("shared_intermediate_size", 1024)
    shared = linear_names({"shared_mlp.input_linear": "gate_up", "shared_mlp.output_linear": "down"})
    if config.get("num_local_experts", 8) == 0:
        activation = activation_of_hf(str(config.get("hidden_act", "silu")), f"It stands in {config.path}.")
        return Sublayer(MLPArgs(config.integer("hidden_size"), width, activation), shared)
    names = {
        "block_sparse_moe.router.layer.weight": "router.weight",
        "block_sparse_moe.input_linear.weight": "experts.w13.weight",
        "block_sparse_moe.output_linear.weight": "experts.w2.weight",
        **{name: f"shared.{slot}" for name, slot in shared.items()},
    }
    return Sublayer(moe_args(config, "intermediate_size", renormalize=True, shared_size=width), names)
