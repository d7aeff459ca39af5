"""Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, num_layers


def llama(config: HFConfig) -> CausalLMArgs:
    """Grouped-query attention with rotary embedding, gated feed-forward, pre-norm; biases only where asked."""
    bias = config.flag("attention_bias", False)
    block = Block(
        mixer=attention(config, qkv_bias=bias, out_bias=bias),
        feed_forward=mlp(config, bias=config.flag("mlp_bias", False)),
        norms=norms(config),
    )
    return decoder(config, [block] * num_layers(config))
