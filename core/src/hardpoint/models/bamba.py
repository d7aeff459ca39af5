"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 with attention in a few layers."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, num_layers, renamed
from hardpoint.models.mamba2 import bamba_mixer

_MODULES = {f"mlp.{x}_proj": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")}


def bamba(config: HFConfig) -> CausalLMArgs:
    """Mamba-2, but for ``attn_layer_indices``, whose heads rotate by half."""
    bias, attends = config.flag("attention_bias", False), config.numbers("attn_layer_indices")
    full = attention(config, default_rotary=0.5, qkv_bias=bias, out_bias=bias)
    mixers = [full if i in attends else bamba_mixer(config) for i in range(num_layers(config))]
    dense = mlp(config, bias=config.flag("mlp_bias", False))
    names = {name.replace("mlp.", "feed_forward.", 1): slot for name, slot in dense.names.items()}
    norm = norms(config, 1e-5, feed_forward="pre_ff_layernorm")
    model = decoder(config, [Block(mixer, replace(dense, names=names), norm) for mixer in mixers])
    return renamed(model, {"model.norm.": "model.final_layernorm."})
