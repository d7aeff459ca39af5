"""DeepSeek-V3.2 and V3.2-Exp (DeepSeek-AI 2025, arXiv:2512.02556)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, decoder, mlp, norms
from hardpoint.models.deepseek import (
    bias_corrected_mixture,
    layers_with_experts,
    multi_token_prediction,
    sparse_latent_attention,
)

_DEFAULTS = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "index_n_heads": 64}


def deepseek_v32(config: HFConfig) -> CausalLMArgs:
    """DeepSeek-V3 whose queries read the positions that each layer's indexer chooses."""
    mixer, dense, norm = sparse_latent_attention(config, _DEFAULTS, interleaved=False), mlp(config), norms(config)
    layers = layers_with_experts(config, 3)
    sparse = bias_corrected_mixture(config, _DEFAULTS) if any(layers) else dense
    model = decoder(config, [Block(mixer, sparse if is_sparse else dense, norm) for is_sparse in layers])
    return replace(model, weight_names={**model.weight_names, **multi_token_prediction(config)})
