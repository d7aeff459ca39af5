"""Mistral 7B and its kin (Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, num_layers, sliding_window


def mistral(config: HFConfig) -> CausalLMArgs:
    """Every layer has the same sliding window, the query's own token included; null means full attention."""
    block = Block(attention(config, window=sliding_window(config)), mlp(config), norms(config))
    return decoder(config, [block] * num_layers(config))
