"""SmolLM3 (Hugging Face 2025)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, num_layers, windows
from hardpoint_plugin_api import CheckpointError


def smollm3(config: HFConfig) -> CausalLMArgs:
    """Llama in which every fourth layer has no rotary embedding (NoPE, arXiv:2501.18795)."""
    bias, dense, norm = config.flag("attention_bias", False), mlp(config, config.flag("mlp_bias", False)), norms(config)
    blocks = []
    for window, rotates in zip(windows(config), _rotating(config), strict=True):
        mixer = attention(config, default_theta=2_000_000.0, qkv_bias=bias, out_bias=bias, window=window)
        if not rotates:
            mixer = replace(mixer, args=replace(mixer.args, rope=None))
        blocks.append(Block(mixer, dense, norm))
    return decoder(config, blocks, default_tied=True)


def _rotating(config: HFConfig) -> list[bool]:
    """Whether each layer rotates. The key ``no_rope_layers`` has 1 for those that do."""
    layers, given = num_layers(config), config.get("no_rope_layers")
    if given is None:
        every = config.integer("no_rope_layer_interval", 4)
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(each not in (0, 1) for each in given):
        raise CheckpointError(
            f"{config.path}: 'no_rope_layers' must have 0 or 1 for each of {layers} layers, got {given}"
        )
    return [bool(each) for each in given]
