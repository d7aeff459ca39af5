"""Qwen3 with mixtures of experts (Yang et al. 2025, arXiv:2505.09388)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.models.dense_decoder import attention_args, dense_decoder, mlp_args, norm_args, sliding_window
from hardpoint.models.moe_decoder import expert_names, moe_args, num_experts, sparse_layers
from hardpoint_plugin_api import BlockArgs

_MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def qwen3_moe(ctx: Context, config: HFConfig) -> CausalLM:
    """Qwen3 in which some layers are mixtures of experts; all layers have the same sliding window, if any."""
    bias, dense, norm = config.flag("attention_bias", False), mlp_args(config), norm_args(config)
    attention = attention_args(
        ctx,
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=norm.eps,
        window=sliding_window(config) if config.flag("use_sliding_window", False) else None,
    )
    sparse = moe_args(config, "moe_intermediate_size", renormalize=config.flag("norm_topk_prob", False))
    blocks = (BlockArgs(attention, sparse if is_sparse else dense, norm) for is_sparse in sparse_layers(config))
    names = {
        "mlp.gate.weight": "mlp.router.weight",
        **expert_names(num_experts(config), "mlp.experts", _MATRICES),
    }
    return dense_decoder(ctx, config, tuple(blocks), names)
