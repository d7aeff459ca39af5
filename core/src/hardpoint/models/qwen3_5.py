"""The language models of Qwen3.5 and Qwen3.5-MoE: Qwen3-Next's layers, with projections that are stored apart.

Checkpoints hold a vision tower, too, which is left out: prompts are text.
"""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, decoder, language_model, linear_names, mlp, norms, zero_centred
from hardpoint.models.gated_delta import (
    FULL,
    MULTI_TOKEN_PREDICTION,
    gated_attention,
    gated_delta_net,
    gated_delta_net_args,
    hybrid_layers,
)
from hardpoint.models.mixture import mixture_with_shared_expert
from hardpoint_plugin_api import LayerArgs

_PROJECTIONS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "ba[b]", "in_proj_a": "ba[a]"}


def qwen3_5(config: HFConfig) -> CausalLMArgs:
    """The language model with dense feed-forwards."""
    return _model(config, mlp(config.text))


def qwen3_5_moe(config: HFConfig) -> CausalLMArgs:
    """The language model with mixtures of experts."""
    return _model(config, mixture_with_shared_expert(config.text, renormalize=True))


def _model(config: HFConfig, feed_forward: Sublayer[LayerArgs]) -> CausalLMArgs:
    text = config.text
    linear = gated_delta_net(gated_delta_net_args(text), linear_names(_PROJECTIONS))
    mixers = {FULL: gated_attention(text)}
    blocks = [Block(mixers.get(kind, linear), feed_forward, norms(text)) for kind in hybrid_layers(text)]
    model = zero_centred(decoder(text, blocks))
    if text is not config:
        model = language_model(model)
    return replace(model, weight_names={**model.weight_names, **MULTI_TOKEN_PREDICTION})
