"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.models.dense_decoder import attention_args, dense_decoder, mlp_args, norm_args, windows
from hardpoint_plugin_api import BlockArgs


def qwen3(ctx: Context, config: HFConfig) -> CausalLM:
    """An RMS norm on each head's q and k; biases only where asked; some layers may have a sliding window."""
    bias, mlp, norm = config.flag("attention_bias", False), mlp_args(config), norm_args(config)
    blocks = (
        BlockArgs(
            attention_args(ctx, config, qkv_bias=bias, out_bias=bias, qk_norm_eps=norm.eps, window=window), mlp, norm
        )
        for window in windows(config)
    )
    return dense_decoder(ctx, config, tuple(blocks))
