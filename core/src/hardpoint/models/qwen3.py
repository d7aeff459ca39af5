"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, windows


def qwen3(config: HFConfig) -> CausalLMArgs:
    """An RMS norm on each head's q and k; biases only where asked; some layers may have a sliding window."""
    bias, dense, norm = config.flag("attention_bias", False), mlp(config), norms(config)
    mixers = (
        attention(config, qkv_bias=bias, out_bias=bias, qk_norm_eps=norm.args.eps, window=window)
        for window in windows(config)
    )
    return decoder(config, [Block(mixer, dense, norm) for mixer in mixers])
