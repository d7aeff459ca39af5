"""Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, linear_names, mlp, norms, num_layers


def phi3(config: HFConfig) -> CausalLMArgs:
    """q, k and v are one tensor, and so are gate and up; null or a sliding window for all layers."""
    mixer = attention(config, window=config.get("sliding_window"))
    mixer = replace(mixer, names=linear_names({"self_attn.qkv_proj": "qkv", "self_attn.o_proj": "out"}))
    block = Block(mixer, mlp(config, fused=True), norms(config, 1e-5))
    return decoder(config, [block] * num_layers(config))
