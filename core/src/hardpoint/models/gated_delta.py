"""Parts that Qwen's hybrids of gated delta nets and gated attention share in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.reading import Address
from hardpoint.models.decoder import Sublayer, attention, layer_kinds, linear_names, norms, num_layers
from hardpoint.ops.activation import activation_of_hf
from hardpoint_plugin_api import AttentionArgs, CheckpointError, GatedDeltaNetArgs

LINEAR, FULL = "linear_attention", "full_attention"
MULTI_TOKEN_PREDICTION = {"mtp.*": None}
"""Layers that predict further tokens, for speculation alone; no drafter here uses them."""


def hybrid_layers(config: HFConfig) -> tuple[str, ...]:
    """LINEAR or FULL for each layer, by ``layer_types``, or else FULL for each ``full_attention_interval``-th."""
    if config.get("layer_types") is not None:
        return layer_kinds(config, "layer_types", (LINEAR, FULL))
    interval = config.integer("full_attention_interval", 4)
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers(config)))


def gated_attention(config: HFConfig) -> Sublayer[AttentionArgs]:
    """Attention whose result is gated; queries and keys are normed, and a quarter of each rotates."""
    bias = config.flag("attention_bias", False)
    return attention(
        config,
        default_rotary=0.25,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=norms(config).args.eps,
        output_gate=True,
    )


def gated_delta_net_args(config: HFConfig) -> GatedDeltaNetArgs:
    """The arguments of a gated delta net."""
    heads, key_heads = config.integer("linear_num_value_heads", 32), config.integer("linear_num_key_heads", 16)
    if heads % key_heads:
        raise CheckpointError(
            f"{config.path}: 'linear_num_value_heads' must be a multiple of 'linear_num_key_heads', "
            f"got {heads} and {key_heads}"
        )
    return GatedDeltaNetArgs(
        hidden_size=config.integer("hidden_size"),
        num_heads=heads,
        num_key_heads=key_heads,
        key_size=config.integer("linear_key_head_dim", 128),
        value_size=config.integer("linear_value_head_dim", 128),
        conv_width=config.integer("linear_conv_kernel_dim", 4),
        norm_eps=norms(config).args.eps,
        activation=activation_of_hf(str(config.get("hidden_act", "silu")), f"It stands in {config.path}."),
    )


def gated_delta_net(args: GatedDeltaNetArgs, projections: Mapping[str, Address]) -> Sublayer[GatedDeltaNetArgs]:
    """A gated delta net, whose families differ in how they store the ``projections`` of the hidden state."""
    names: dict[str, Address] = {
        "conv1d.weight": "conv",
        "A_log": "rate",
        "dt_bias": "step_bias",
        "norm.weight": "norm",
        **linear_names({"out_proj": "out"}),
        **projections,
    }
    return Sublayer(args, {f"linear_attn.{name}": slot for name, slot in names.items()})
