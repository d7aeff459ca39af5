"""GLM-4 dense: the models of 2024 (arXiv:2406.12793) and those of 2025 (GLM-4-0414), in Transformers' format."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, adjusted, attention, decoder, mlp, norms, num_layers
from hardpoint_plugin_api import AttentionArgs

_EPS = 1.5625e-7


def glm(config: HFConfig) -> CausalLMArgs:
    """Half of each head rotates, neighbouring elements as pairs; gate and up are one tensor."""
    block = Block(_attention(config), mlp(config, fused=True), norms(config, _EPS))
    return decoder(config, [block] * num_layers(config))


def glm4(config: HFConfig) -> CausalLMArgs:
    """The same, with a norm of each sub-layer's result."""
    norm = norms(config, _EPS)
    mixer = adjusted(_attention(config), norm=norm.args, module="post_self_attn_layernorm")
    dense = adjusted(mlp(config, fused=True), norm=norm.args, module="post_mlp_layernorm")
    return decoder(config, [Block(mixer, dense, norm)] * num_layers(config))


def _attention(config: HFConfig) -> Sublayer[AttentionArgs]:
    bias = config.flag("attention_bias", True)
    return attention(config, default_rotary=0.5, interleaved=True, qkv_bias=bias)
