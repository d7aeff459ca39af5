"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import (
    Block,
    Sublayer,
    attention,
    decoder,
    linear_names,
    mlp,
    norms,
    num_layers,
    sliding_window,
    windows,
)
from hardpoint.models.mixture import expert_names, moe_args, num_experts, sparse_layers

_MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_LINEARS = {
    "mlp.gate": "router",
    "mlp.shared_expert.gate_proj": "shared.gate_up[gate]",
    "mlp.shared_expert.up_proj": "shared.gate_up[up]",
    "mlp.shared_expert.down_proj": "shared.down",
    "mlp.shared_expert_gate": "shared_gate",
}


def qwen2_moe(config: HFConfig) -> CausalLMArgs:
    """Qwen2 in which some layers are mixtures of experts, with a gated expert beside them that every token goes to."""
    bias, dense, norm = config.flag("qkv_bias", True), mlp(config), norms(config)
    sparse = Sublayer(
        moe_args(
            config,
            "moe_intermediate_size",
            renormalize=config.flag("norm_topk_prob", False),
            shared_size=config.integer("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
        linear_names(_LINEARS) | expert_names(num_experts(config), "mlp.experts", _MATRICES),
    )
    blocks = (
        Block(attention(config, qkv_bias=bias, window=window), sparse if is_sparse else dense, norm)
        for window, is_sparse in zip(_windows(config), sparse_layers(config), strict=True)
    )
    return decoder(config, list(blocks))


def _windows(config: HFConfig) -> tuple[int | None, ...]:
    """As in Qwen2, but for configs without ``layer_types``: every second one of the first ``max_window_layers``."""
    if config.get("layer_types") is not None or not config.flag("use_sliding_window", False):
        return windows(config)
    layers, window = num_layers(config), config.integer("sliding_window", sliding_window(config))
    last = config.integer("max_window_layers", layers)
    return tuple(window if i % 2 == 0 and i < last else None for i in range(layers))
