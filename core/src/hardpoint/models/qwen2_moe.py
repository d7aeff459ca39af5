"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, num_layers, sliding_window, windows
from hardpoint.models.mixture import mixture_with_shared_expert, sparse_layers


def qwen2_moe(config: HFConfig) -> CausalLMArgs:
    """Qwen2 in which some layers are mixtures of experts, with a gated expert beside them that every token goes to."""
    bias, dense, norm = config.flag("qkv_bias", True), mlp(config), norms(config)
    sparse = mixture_with_shared_expert(config, renormalize=config.flag("norm_topk_prob", False))
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
