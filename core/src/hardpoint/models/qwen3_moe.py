"""Qwen3 with mixtures of experts (Yang et al. 2025, arXiv:2505.09388)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, attention, decoder, linear_names, mlp, norms, sliding_window
from hardpoint.models.mixture import expert_names, moe_args, num_experts, sparse_layers

_MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def qwen3_moe(config: HFConfig) -> CausalLMArgs:
    """Qwen3 in which some layers are mixtures of experts; all layers have the same sliding window, if any."""
    bias, dense, norm = config.flag("attention_bias", False), mlp(config), norms(config)
    mixer = attention(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=norm.args.eps,
        window=sliding_window(config) if config.flag("use_sliding_window", False) else None,
    )
    sparse = Sublayer(
        moe_args(config, "moe_intermediate_size", renormalize=config.flag("norm_topk_prob", False)),
        linear_names({"mlp.gate": "router"}) | expert_names(num_experts(config), "mlp.experts", _MATRICES),
    )
    blocks = [Block(mixer, sparse if is_sparse else dense, norm) for is_sparse in sparse_layers(config)]
    return decoder(config, blocks)
