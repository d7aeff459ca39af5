"""Mistral 7B and its kin (Jiang et al. 2023, arXiv:2310.06825), and Ministral 8B (Mistral AI 2024)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, layer_types, mlp, norms, num_layers, sliding_window


def mistral(config: HFConfig) -> CausalLMArgs:
    """Every layer has the same sliding window, the query's own token included; null means full attention."""
    block = Block(attention(config, window=sliding_window(config)), mlp(config), norms(config))
    return decoder(config, [block] * num_layers(config))


def ministral(config: HFConfig) -> CausalLMArgs:
    """Layers with a sliding window and layers without, as ``layer_types`` has it; without that key all have one."""
    window = sliding_window(config)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = layer_types(config, [default] * num_layers(config))
    dense, norm = mlp(config), norms(config)
    mixers = (attention(config, window=window if kind == "sliding_attention" else None) for kind in kinds)
    return decoder(config, [Block(mixer, dense, norm) for mixer in mixers])
