"""Seed-OSS (ByteDance 2025)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, num_layers


def seed_oss(config: HFConfig) -> CausalLMArgs:
    """Llama with biases of q, k and v."""
    mixer = attention(
        config,
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias", False),
    )
    block = Block(mixer, mlp(config, bias=config.flag("mlp_bias", False)), norms(config))
    return decoder(config, [block] * num_layers(config))
