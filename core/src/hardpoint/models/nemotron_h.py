"""Nemotron-H and Nemotron 3 Nano (arXiv:2504.03624): each layer is one Mamba-2 mixer, attention without
rotation, a feed-forward, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.reading import Address
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, attention, decoder, linear_names, renamed
from hardpoint.models.deepseek import grouped
from hardpoint.models.mamba2 import checked, mamba2
from hardpoint.ops.activation import activation_of_hf
from hardpoint_plugin_api import (
    AttentionArgs,
    CheckpointError,
    LayerArgs,
    Mamba2Args,
    MLPArgs,
    MoEArgs,
    NormArgs,
    RouterArgs,
)

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_TODAY = {"linear_attention": "mamba", "full_attention": "attention"}
_NAMES = {
    "model.layers.": "backbone.layers.",
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
}


def nemotron_h(config: HFConfig) -> CausalLMArgs:
    """Layers by ``layers_block_type``, or by the letters of ``hybrid_override_pattern``. As in Transformers, output
    heads have a weight of their own, whatever ``tie_word_embeddings`` says."""
    config = HFConfig(config.folder, {**config.data, "tie_word_embeddings": False})
    norm = Sublayer(
        NormArgs(config.integer("hidden_size"), config.number("layer_norm_epsilon", 1e-5)),
        {"norm.weight": "mixer_norm.weight"},
    )
    made: dict[str, Callable[[HFConfig], Sublayer[LayerArgs]]] = {
        "mamba": _mamba,
        "attention": _attention,
        "mlp": _mlp,
        "moe": _moe,
    }
    kinds = _kinds(config)
    layers = {kind: made[kind](config) for kind in dict.fromkeys(kinds)}
    model = renamed(decoder(config, [Block(layers[kind], None, norm) for kind in kinds]), _NAMES)
    return replace(model, weight_names={**model.weight_names, "mtp.*": None})


def _kinds(config: HFConfig) -> tuple[str, ...]:
    """The kind of each layer, one of the values of _LETTERS."""
    pattern, types = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if types is None and isinstance(pattern, str):
        types = [_LETTERS.get(letter, letter) for letter in pattern]
    kinds = [_TODAY.get(str(kind), str(kind)) for kind in types] if isinstance(types, list) else []
    if not kinds or any(kind not in _LETTERS.values() for kind in kinds):
        raise CheckpointError(
            f"{config.path}: 'layers_block_type' must name mamba, attention, mlp or moe for each layer, or "
            f"'hybrid_override_pattern' must have one of the letters {' '.join(_LETTERS)} for each; "
            f"got {types if types is not None else pattern!r}"
        )
    return tuple(kinds)


def _mamba(config: HFConfig) -> Sublayer[Mamba2Args]:
    args = Mamba2Args(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("mamba_num_heads", 128),
        head_size=config.integer("mamba_head_dim", 64),
        num_groups=config.integer("n_groups", 8),
        state_size=config.integer("ssm_state_size", 128),
        conv_width=config.integer("conv_kernel", 4),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=_activation(config, "mamba_hidden_act", "silu"),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        min_step=config.number("time_step_min", 1e-3),
    )
    return mamba2(checked(config, args), "mixer")


def _attention(config: HFConfig) -> Sublayer[AttentionArgs]:
    """Attention without positions: what Mamba layers have seen tells them."""
    rotating = attention(config)
    return Sublayer(replace(rotating.args, rope=None), _in_mixer(rotating.names, "self_attn."))


def _mlp(config: HFConfig) -> Sublayer[MLPArgs]:
    bias = config.flag("mlp_bias", False)
    args = MLPArgs(
        config.integer("hidden_size"),
        config.integer("intermediate_size"),
        _activation(config, "mlp_hidden_act", "relu2"),
        gated=False,
        bias=bias,
    )
    return Sublayer(args, linear_names({"mixer.up_proj": "gate_up", "mixer.down_proj": "down"}, bias=bias))


def _moe(config: HFConfig) -> Sublayer[MoEArgs]:
    """Experts without gates, chosen by sigmoids with a correction bias; a wider one serves every token."""
    if config.get("moe_latent_size") is not None:
        raise CheckpointError(f"{config.path}: 'moe_latent_size' is not supported: experts take whole hidden states")
    experts = config.integer("n_routed_experts", 8)
    router = RouterArgs(
        experts,
        config.integer("num_experts_per_tok", 2),
        "sigmoid",
        bias=True,
        renormalize=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    args = MoEArgs(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        router=grouped(config, router, 1, 1),
        activation=_activation(config, "mlp_hidden_act", "relu2"),
        gated=False,
        shared_size=config.integer("moe_shared_expert_intermediate_size"),
    )
    modules = {"gate": "router", "shared_experts.up_proj": "shared.gate_up", "shared_experts.down_proj": "shared.down"}
    for e in range(experts):
        modules |= {f"experts.{e}.up_proj": f"experts.w13[{e}]", f"experts.{e}.down_proj": f"experts.w2[{e}]"}
    names = linear_names(modules) | {"gate.e_score_correction_bias": "correction_bias"}
    return Sublayer(args, {f"mixer.{name}": slot for name, slot in names.items()})


def _in_mixer(names: Mapping[str, Address], module: str) -> dict[str, Address]:
    return {f"mixer.{name.removeprefix(module)}": slot for name, slot in names.items()}


def _activation(config: HFConfig, key: str, default: str) -> str:
    return activation_of_hf(str(config.get(key, default)), f"It stands in {config.path}.")
