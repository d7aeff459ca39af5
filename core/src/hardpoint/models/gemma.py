"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and the text part of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import (
    Block,
    Sublayer,
    adjusted,
    attention,
    decoder,
    layer_types,
    mlp,
    norms,
    num_layers,
)
from hardpoint_plugin_api import AttentionArgs, CheckpointError, RopeArgs

_FULL, _SLIDING = "full_attention", "sliding_attention"


def gemma(config: HFConfig) -> CausalLMArgs:
    """Pre-norm blocks; embeddings multiplied by the root of the width; gelu by its tanh form, whatever old configs say.

    Configs of the first release say ``gelu``, and were meant and trained with the tanh form.
    """
    mixer = attention(config, qkv_bias=_bias(config), out_bias=_bias(config))
    dense = mlp(config)
    dense = replace(dense, args=replace(dense.args, activation="gelu_tanh"))
    return _model(config, [Block(mixer, dense, norms(config))] * num_layers(config))


def gemma2(config: HFConfig) -> CausalLMArgs:
    """Every second layer has a sliding window; each sub-layer's result is normed; attention and logits are capped."""
    kinds = layer_types(config, [_FULL if i % 2 else _SLIDING for i in range(num_layers(config))])
    cap = _optional(config, "attn_logit_softcapping", 50.0)
    mixers = {kind: _mixer(config, kind, cap) for kind in dict.fromkeys(kinds)}
    cap = _optional(config, "final_logit_softcapping", 30.0)
    return replace(_model(config, _sandwiches(config, [mixers[kind] for kind in kinds])), logits_soft_cap=cap)


def gemma3(config: HFConfig) -> CausalLMArgs:
    """Five layers with a sliding window, which rotate by a theta of their own, then one without; q and k are normed.

    Configs have rotary parameters by type of layer, or, before Transformers 5, ``rope_local_base_freq`` for windows.
    """
    every = config.integer("sliding_window_pattern", 6)
    kinds = layer_types(config, [_SLIDING if (i + 1) % every else _FULL for i in range(num_layers(config))])
    if config.flag("use_bidirectional_attention", False):
        raise CheckpointError(f"{config.path}: 'use_bidirectional_attention' is not supported: attention is causal")
    cap, eps = _optional(config, "attn_logit_softcapping", None), norms(config).args.eps
    mixers = {
        _SLIDING: _mixer(config, _SLIDING, cap, qk_norm_eps=eps),
        _FULL: _mixer(config, _FULL, cap, qk_norm_eps=eps, default_theta=1_000_000.0),
    }
    if not isinstance(config.get("rope_parameters"), Mapping):
        local, theta = mixers[_SLIDING], config.number("rope_local_base_freq", 10_000.0)
        rope = RopeArgs(local.args.head_size, theta)
        mixers[_SLIDING] = replace(local, args=replace(local.args, rope=rope))
    cap = _optional(config, "final_logit_softcapping", None)
    return replace(_model(config, _sandwiches(config, [mixers[kind] for kind in kinds])), logits_soft_cap=cap)


def _mixer(
    config: HFConfig,
    kind: str,
    soft_cap: float | None,
    *,
    qk_norm_eps: float | None = None,
    default_theta: float = 10_000.0,
) -> Sublayer[AttentionArgs]:
    """The attention of layers of a type."""
    return attention(
        config,
        default_theta=default_theta,
        layer_type=kind,
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        window=config.integer("sliding_window", 4096) if kind == _SLIDING else None,
        soft_cap=soft_cap,
        qk_norm_eps=qk_norm_eps,
        qkv_bias=_bias(config),
        out_bias=_bias(config),
    )


def _sandwiches(config: HFConfig, mixers: Sequence[Sublayer[AttentionArgs]]) -> list[Block]:
    """Blocks with a norm before and after each sub-layer."""
    norm = norms(config, feed_forward="pre_feedforward_layernorm")
    dense = mlp(config, activation="hidden_activation", default_activation="gelu_pytorch_tanh")
    dense_normed = adjusted(dense, norm=norm.args, module="post_feedforward_layernorm")
    return [
        Block(adjusted(mixer, norm=norm.args, module="post_attention_layernorm"), dense_normed, norm)
        for mixer in mixers
    ]


def _model(config: HFConfig, blocks: Sequence[Block]) -> CausalLMArgs:
    """The model around them. Weights of norms are stored less one."""
    made = decoder(config, blocks, default_tied=True)
    names = {
        name: f"{slot}[plus_one]" if slot is not None and name.endswith("norm.weight") else slot
        for name, slot in made.weight_names.items()
    }
    return replace(made, weight_names=names, embedding_multiplier=float(config.integer("hidden_size")) ** 0.5)


def _bias(config: HFConfig) -> bool:
    return config.flag("attention_bias", False)


def _optional(config: HFConfig, key: str, default: float | None) -> float | None:
    """A number, or None where the config has null; ``default`` where it has no such key."""
    if key not in config.data:
        return default
    return None if config.data[key] is None else config.number(key)
