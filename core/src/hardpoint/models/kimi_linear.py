"""Kimi Linear (Moonshot AI 2025, arXiv:2510.26692): Kimi Delta Attention, and latent attention without positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.reading import Address
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, decoder, layer_kinds, linear_names, mlp, norms, num_layers
from hardpoint.models.deepseek import bias_corrected_mixture, latent_attention, layers_with_experts
from hardpoint.models.gated_delta import FULL, LINEAR
from hardpoint.ops.activation import activation_of_hf
from hardpoint_plugin_api import CheckpointError, KimiDeltaAttentionArgs, MLAArgs, MoEArgs

_OTHER_KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""The names of these keys in other families."""
_DEFAULTS = {"routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1}
_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def kimi_linear(config: HFConfig) -> CausalLMArgs:
    """Layers by ``layer_types``, or by the numbers, from 1 on, that ``linear_attn_config`` lists."""
    config = _with_known_keys(config)
    mixers: dict[str, Sublayer[Any]] = {LINEAR: _delta_attention(config), FULL: _latent_attention(config)}
    dense, norm, are_sparse = _dense(config), norms(config, 1e-5), layers_with_experts(config, 1)
    sparse = _mixture(config) if any(are_sparse) else None
    blocks = [
        Block(mixers[kind], sparse if is_sparse else dense, norm)
        for kind, is_sparse in zip(_kinds(config), are_sparse, strict=True)
    ]
    return decoder(config, blocks)


def _with_known_keys(config: HFConfig) -> HFConfig:
    """``config`` with the keys of other families, and those of ``linear_attn_config`` as Transformers calls them. As
    there, output heads have a weight of their own."""
    linear = config.get("linear_attn_config", {})
    if not isinstance(linear, Mapping):
        raise CheckpointError(f"{config.path}: 'linear_attn_config' must be an object, got {linear!r:.80}")
    known = {ours: config.data[theirs] for ours, theirs in _OTHER_KEYS.items() if theirs in config.data}
    for ours, theirs in (
        ("linear_head_dim", "head_dim"),
        ("linear_num_heads", "num_heads"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ):
        if theirs in linear:
            known[ours] = linear[theirs]
    return HFConfig(config.folder, {"q_lora_rank": None, **config.data, **known, "tie_word_embeddings": False})


def _kinds(config: HFConfig) -> tuple[str, ...]:
    """LINEAR or FULL for each layer."""
    if config.get("layer_types") is not None:
        return layer_kinds(config, "layer_types", (LINEAR, FULL))
    full = config.get("linear_attn_config", {}).get("full_attn_layers")
    if not isinstance(full, list):
        raise CheckpointError(f"{config.path}: 'linear_attn_config' must list 'full_attn_layers', got {full!r}")
    return tuple(FULL if i + 1 in full else LINEAR for i in range(num_layers(config)))


def _delta_attention(config: HFConfig) -> Sublayer[KimiDeltaAttentionArgs]:
    size = config.integer("linear_head_dim", 128)
    args = KimiDeltaAttentionArgs(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("linear_num_heads", 32),
        head_size=size,
        gate_rank=size,
        conv_width=config.integer("linear_conv_kernel_dim", 4),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        activation=activation_of_hf(str(config.get("hidden_act", "silu")), f"It stands in {config.path}."),
    )
    linears = {f"{x}_proj": f"qkv[{x}]" for x in "qkv"} | {"b_proj": "b", "o_proj": "out"}
    linears |= {"f_a_proj": "gates[decay]", "g_a_proj": "gates[z]", "f_b_proj": "decay", "g_b_proj": "z"}
    names = linear_names(linears) | {f"{x}_conv1d.weight": f"conv[{x}]" for x in "qkv"}
    names |= {"A_log": "rate", "dt_bias": "step_bias", "o_norm.weight": "norm"}
    return Sublayer(args, {f"self_attn.{name}": slot for name, slot in names.items()})


def _latent_attention(config: HFConfig) -> Sublayer[MLAArgs]:
    """Latent attention in which nothing rotates."""
    rotating = latent_attention(config)
    return replace(rotating, args=replace(rotating.args, rope=None))


def _dense(config: HFConfig) -> Sublayer[Any]:
    """A feed-forward; Transformers writes its tensors where those of a mixture stand."""
    found = mlp(config)
    others = {name.replace("mlp.", "block_sparse_moe.", 1): slot for name, slot in found.names.items()}
    return replace(found, names={**found.names, **others})


def _mixture(config: HFConfig) -> Sublayer[MoEArgs]:
    """DeepSeek-V3's, with other names of its tensors."""
    found = bias_corrected_mixture(config, _DEFAULTS)
    names: dict[str, Address] = {}
    for name, slot in found.names.items():
        *outer, matrix, tensor = name.split(".")
        if ".experts." in name and matrix in _MATRICES:
            name = ".".join([*outer, _MATRICES[matrix], tensor])
        names[name.replace("mlp.", "block_sparse_moe.", 1)] = slot
    return replace(found, names=names)
