"""Mistral 7B and its kin (Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.models.dense_decoder import (
    attention_args,
    dense_decoder,
    mlp_args,
    norm_args,
    num_layers,
    sliding_window,
)
from hardpoint_plugin_api import BlockArgs


def mistral(ctx: Context, config: HFConfig) -> CausalLM:
    """Every layer has the same sliding window, the query's own token included; null means full attention."""
    block = BlockArgs(
        attention=attention_args(ctx, config, window=sliding_window(config)),
        mlp=mlp_args(config),
        norm=norm_args(config),
    )
    return dense_decoder(ctx, config, (block,) * num_layers(config))
