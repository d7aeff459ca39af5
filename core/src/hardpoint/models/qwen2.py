"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.models.dense_decoder import attention_args, dense_decoder, mlp_args, norm_args, windows
from hardpoint_plugin_api import BlockArgs


def qwen2(ctx: Context, config: HFConfig) -> CausalLM:
    """Biases on q, k and v; some layers may have a sliding window."""
    mlp, norm = mlp_args(config), norm_args(config)
    blocks = (
        BlockArgs(attention_args(ctx, config, qkv_bias=True, window=window), mlp, norm) for window in windows(config)
    )
    return dense_decoder(ctx, config, tuple(blocks))
