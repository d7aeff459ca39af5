"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, windows


def qwen2(config: HFConfig) -> CausalLMArgs:
    """Biases on q, k and v; some layers may have a sliding window."""
    dense, norm = mlp(config), norms(config)
    mixers = (attention(config, qkv_bias=True, window=window) for window in windows(config))
    return decoder(config, [Block(mixer, dense, norm) for mixer in mixers])
