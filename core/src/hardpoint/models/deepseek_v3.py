"""DeepSeek-V3, V3.1 and R1 (DeepSeek-AI 2024, arXiv:2412.19437); Kimi-K2 (arXiv:2507.20534) has their shape."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, decoder, mlp, norms
from hardpoint.models.deepseek import (
    bias_corrected_mixture,
    latent_attention,
    layers_with_experts,
    multi_token_prediction,
)

_DEFAULTS = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}


def deepseek_v3(config: HFConfig) -> CausalLMArgs:
    """DeepSeek-V2 with experts chosen by sigmoids and a correction bias."""
    mixer, dense, norm = latent_attention(config), mlp(config), norms(config)
    layers = layers_with_experts(config, 3)
    sparse = bias_corrected_mixture(config, _DEFAULTS) if any(layers) else dense
    model = decoder(config, [Block(mixer, sparse if is_sparse else dense, norm) for is_sparse in layers])
    return replace(model, weight_names={**model.weight_names, **multi_token_prediction(config)})
