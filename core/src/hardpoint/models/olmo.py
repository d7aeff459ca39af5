"""OLMo 2 (arXiv:2501.00656) and OLMo 3 (allenai/Olmo-3-7B-Instruct), in Transformers' format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import (
    Block,
    Sublayer,
    adjusted,
    attention,
    decoder,
    layer_types,
    mlp,
    norms,
    num_layers,
    sliding_window,
)
from hardpoint_plugin_api import AttentionArgs, RopeArgs

_EPS = 1e-5
_FULL, _SLIDING = "full_attention", "sliding_attention"


def olmo2(config: HFConfig) -> CausalLMArgs:
    """Sub-layers' results are normed, their inputs are not; queries of all heads are normed as one vector, so are keys.

    Biases only where asked.
    """
    return _model(config, [_attention(config)] * num_layers(config))


def olmo3(config: HFConfig) -> CausalLMArgs:
    """OLMo 2 with a sliding window in three of four layers, in which rotary embeddings are not scaled."""
    kinds = layer_types(config, [_SLIDING if (i + 1) % 4 else _FULL for i in range(num_layers(config))])
    full = _attention(config, theta=500_000.0, kind=_FULL)
    sliding = _attention(config, theta=500_000.0, kind=_SLIDING, window=sliding_window(config))
    if not isinstance(config.get("rope_parameters"), Mapping):  # before Transformers 5, one scaling: of full attention
        rope = RopeArgs(sliding.args.head_size, config.number("rope_theta", 500_000.0))
        sliding = replace(sliding, args=replace(sliding.args, rope=rope))
    mixers = {_FULL: full, _SLIDING: sliding}
    return _model(config, [mixers[kind] for kind in kinds])


def _attention(
    config: HFConfig, *, theta: float = 10_000.0, kind: str | None = None, window: int | None = None
) -> Sublayer[AttentionArgs]:
    bias, eps = config.flag("attention_bias", False), norms(config, _EPS).args.eps
    made = attention(
        config,
        default_theta=theta,
        layer_type=kind,
        window=window,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=eps,
    )
    return replace(made, args=replace(made.args, qk_norm_across_heads=True))


def _model(config: HFConfig, mixers: Sequence[Sublayer[AttentionArgs]]) -> CausalLMArgs:
    norm = norms(config, _EPS).args
    dense = adjusted(mlp(config), norm=norm, module="post_feedforward_layernorm")
    blocks = [
        Block(adjusted(mixer, norm=norm, module="post_attention_layernorm"), dense, Sublayer(norm, {}), pre_norm=False)
        for mixer in mixers
    ]
    return decoder(config, blocks)
