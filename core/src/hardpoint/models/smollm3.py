"""SmolLM3 (Hugging Face 2025)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, rotating_layers, windows


def smollm3(config: HFConfig) -> CausalLMArgs:
    """Llama in which every fourth layer has no rotary embedding (NoPE, arXiv:2501.18795)."""
    bias, dense, norm = config.flag("attention_bias", False), mlp(config, config.flag("mlp_bias", False)), norms(config)
    blocks = []
    for window, rotates in zip(windows(config), rotating_layers(config), strict=True):
        mixer = attention(config, default_theta=2_000_000.0, qkv_bias=bias, out_bias=bias, window=window)
        if not rotates:
            mixer = replace(mixer, args=replace(mixer.args, rope=None))
        blocks.append(Block(mixer, dense, norm))
    return decoder(config, blocks, default_tied=True)
