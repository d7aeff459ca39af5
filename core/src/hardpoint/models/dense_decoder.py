"""What the decoder families share in Hugging Face's format: config keys, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM, CausalLMArgs
from hardpoint.ops.activation import activation_of_hf
from hardpoint.ops.rope_table import rope_args
from hardpoint_plugin_api import AttentionArgs, BlockArgs, CheckpointError, EmbeddingArgs, MLPArgs, NormArgs

_LAYER_TYPES = ("full_attention", "sliding_attention")
_WINDOW = 4096


def dense_decoder(
    ctx: Context, config: HFConfig, blocks: tuple[BlockArgs, ...], moe_names: Mapping[str, str] | None = None
) -> CausalLM:
    """The model around ``blocks``: embedding, final norm, head (tied where the config says so).

    ``moe_names`` are the tensors of a mixture of experts: name within its layer -> slot within its block.
    """
    args = CausalLMArgs(
        embedding=EmbeddingArgs(config.integer("vocab_size"), config.integer("hidden_size")),
        blocks=blocks,
        norm=norm_args(config),
        tied=config.flag("tie_word_embeddings", False),
    )
    return CausalLM(ctx, args, decoder_names(args, moe_names or {}))


def num_layers(config: HFConfig) -> int:
    """How many blocks."""
    return config.integer("num_hidden_layers")


class AttentionVariations(TypedDict, total=False):
    """Where families differ; fields of AttentionArgs."""

    qkv_bias: bool
    out_bias: bool
    qk_norm_eps: float
    window: int | None


def attention_args(
    ctx: Context, config: HFConfig, *, default_theta: float = 10_000.0, **variations: Unpack[AttentionVariations]
) -> AttentionArgs:
    """Grouped-query attention, rotary embedding tabulated as far as this engine's longest sequence.

    ``default_theta`` is the family's own, for configs that leave it out.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", heads)
    if heads % num_kv_heads:
        raise CheckpointError(
            f"{config.path}: 'num_attention_heads' must be a multiple of 'num_key_value_heads', "
            f"got {heads} and {num_kv_heads}"
        )
    head_size = config.integer("head_dim", hidden // heads)
    window = variations.get("window")
    if window is not None:  # families pass it on as it stands, or their default
        variations["window"] = config.integer("sliding_window", window)
    return AttentionArgs(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        rope=rope_args(config.data, head_size, ctx.max_model_len, default_theta=default_theta, file=str(config.path)),
        **variations,
    )


def norm_args(config: HFConfig, default_eps: float = 1e-6) -> NormArgs:
    """The norms of the residual stream."""
    return NormArgs(config.integer("hidden_size"), config.number("rms_norm_eps", default_eps))


def mlp_args(config: HFConfig, bias: bool = False) -> MLPArgs:
    """A gated feed-forward."""
    return MLPArgs(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        activation=activation_of_hf(str(config.get("hidden_act", "silu")), f"It stands in {config.path}."),
        bias=bias,
    )


def sliding_window(config: HFConfig) -> Any:
    """``sliding_window`` as it stands. Null means none; configs that leave the key out mean Transformers' default."""
    return config.data.get("sliding_window", _WINDOW)


def windows(config: HFConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, from ``layer_types`` or, before that key, ``max_window_layers``."""
    layers = num_layers(config)
    window = sliding_window(config) if config.flag("use_sliding_window", False) else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", layers)
        if type(first) is not int or first < 0:
            raise CheckpointError(
                f"{config.path}: 'max_window_layers' must be a whole number, 0 or more, got {first!r}"
            )
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"{config.path}: 'layer_types' must name {layers} layers, each full_attention or sliding_attention; "
            f"got {kinds}"
        )
    if window is None and "sliding_attention" in kinds:
        window = config.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_ATTENTION = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.qkv.weight[q]",
    "self_attn.k_proj.weight": "attention.qkv.weight[k]",
    "self_attn.v_proj.weight": "attention.qkv.weight[v]",
    "self_attn.o_proj.weight": "attention.out.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
}
_MLP = {
    "mlp.gate_proj.weight": "mlp.gate_up.weight[gate]",
    "mlp.up_proj.weight": "mlp.gate_up.weight[up]",
    "mlp.down_proj.weight": "mlp.down.weight",
}
_QK_NORM = {"self_attn.q_norm.weight": "attention.q_norm", "self_attn.k_norm.weight": "attention.k_norm"}
"""Names within a layer of the checkpoint -> slots within a block."""


def decoder_names(args: CausalLMArgs, moe_names: Mapping[str, str]) -> dict[str, str | None]:
    """Tensor names of Hugging Face's decoders, each with the slot it goes to (None: not needed if there)."""
    names: dict[str, str | None] = {"model.norm.weight": "norm.weight"}
    for i, block in enumerate(args.blocks):
        for name, address in _block_names(block, moe_names).items():
            names[f"model.layers.{i}.{name}"] = f"stack.blocks.{i}.{address}"
    if args.tied:
        return names | {"model.embed_tokens.weight": "head.linear.weight", "lm_head.weight": None}
    return names | {"model.embed_tokens.weight": "embedding.weight", "lm_head.weight": "head.linear.weight"}


def _block_names(block: BlockArgs, moe_names: Mapping[str, str]) -> dict[str, str]:
    attention, mlp = block.attention, block.mlp
    names = _ATTENTION | dict(_MLP if isinstance(mlp, MLPArgs) else moe_names)
    mlp_bias = isinstance(mlp, MLPArgs) and mlp.bias
    biased = {
        "attention.qkv.": attention.qkv_bias,
        "attention.out.": attention.out_bias,
        "mlp.gate_up.": mlp_bias,
        "mlp.down.": mlp_bias,
    }
    for tensor, address in list(names.items()):
        if any(on and address.startswith(layer) for layer, on in biased.items()):
            names[tensor.replace(".weight", ".bias")] = address.replace(".weight", ".bias")
    return names | (_QK_NORM if attention.qk_norm_eps is not None else {})
