"""Granite 3 and 4 dense (IBM 2024, granite-3.0 technical report)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, adjusted, attention, decoder, mlp, norms, num_layers


def granite(config: HFConfig) -> CausalLMArgs:
    """Llama with multipliers: of embeddings, of attention's scores, of what joins the residual stream, of logits."""
    bias, multiplier = config.flag("attention_bias", False), config.number("residual_multiplier", 1.0)
    mixer = attention(config, qkv_bias=bias, out_bias=bias, scale=config.number("attention_multiplier", 1.0))
    dense = mlp(config, bias=config.flag("mlp_bias", False))
    block = Block(adjusted(mixer, multiplier=multiplier), adjusted(dense, multiplier=multiplier), norms(config))
    return replace(
        decoder(config, [block] * num_layers(config)),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / config.number("logits_scaling", 1.0),
    )
