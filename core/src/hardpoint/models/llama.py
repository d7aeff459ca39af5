"""Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.models.dense_decoder import attention_args, dense_decoder, mlp_args, norm_args, num_layers
from hardpoint_plugin_api import BlockArgs


def llama(ctx: Context, config: HFConfig) -> CausalLM:
    """Grouped-query attention with rotary embedding, gated feed-forward, pre-norm; biases only where asked."""
    bias = config.flag("attention_bias", False)
    block = BlockArgs(
        attention=attention_args(ctx, config, qkv_bias=bias, out_bias=bias),
        mlp=mlp_args(config, bias=config.flag("mlp_bias", False)),
        norm=norm_args(config),
    )
    return dense_decoder(ctx, config, (block,) * num_layers(config))
