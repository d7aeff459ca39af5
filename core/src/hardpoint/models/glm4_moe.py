"""GLM-4.5 to 4.7 with mixtures of experts (Zhipu AI 2025, arXiv:2508.06471)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms
from hardpoint.models.deepseek import bias_corrected_mixture, layers_with_experts, multi_token_prediction

_DEFAULTS = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}


def glm4_moe(config: HFConfig) -> CausalLMArgs:
    """Grouped-query attention that rotates a part of each head; DeepSeek-V3's mixtures of experts."""
    norm, dense = norms(config, default_eps=1e-5), mlp(config)
    mixer = attention(
        config,
        default_rotary=0.5,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm_eps=norm.args.eps if config.flag("use_qk_norm", False) else None,
    )
    layers = layers_with_experts(config, 1)
    sparse = bias_corrected_mixture(config, _DEFAULTS) if any(layers) else dense
    model = decoder(config, [Block(mixer, sparse if is_sparse else dense, norm) for is_sparse in layers])
    return replace(model, weight_names={**model.weight_names, **multi_token_prediction(config)})
