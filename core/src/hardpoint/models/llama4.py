"""The language models of Llama 4 (Meta 2025, meta-llama/Llama-4-Scout-17B-16E).

Checkpoints hold a vision tower, too, which is left out: prompts are text.
"""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import (
    Block,
    Sublayer,
    attention,
    decoder,
    layer_kinds,
    linear_names,
    mlp,
    norms,
    num_layers,
    part_named,
    rotating_layers,
)
from hardpoint.models.mixture import moe_args, names_of_each_expert
from hardpoint_plugin_api import AttentionArgs, CheckpointError, MLPArgs, MoEArgs, QueryScalingArgs

_EPS = 1e-5
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_DENSE = {
    "feed_forward.gate_proj": "gate_up[gate]",
    "feed_forward.up_proj": "gate_up[up]",
    "feed_forward.down_proj": "down",
}
_STACKED = {
    "feed_forward.experts.gate_up_proj": "experts.w13.weight[transposed]",
    "feed_forward.experts.down_proj": "experts.w2.weight[transposed]",
}


def llama4(config: HFConfig) -> CausalLMArgs:
    """Layers that rotate attend within chunks; in others nothing rotates, and queries grow with their position.

    Layers are dense, or mixtures with an expert beside them that all tokens share.
    """
    text = config.text
    norm, dense, sparse = norms(text, _EPS), _dense(text), _mixture(text)
    mixtures, kinds, blocks = _mixtures(text), _kinds(text), []
    for i, (rotates, kind) in enumerate(zip(rotating_layers(text), kinds, strict=True)):
        mixer = _attention(text, rotates=rotates, chunked=kind == _CHUNKED)
        blocks.append(Block(mixer, sparse if i in mixtures else dense, norm))
    model = decoder(text, blocks)
    if text is config:
        return model
    return part_named(model, "language_model", other_parts=("vision_model", "multi_modal_projector"))


def _attention(config: HFConfig, *, rotates: bool, chunked: bool) -> Sublayer[AttentionArgs]:
    """Transformers norms queries and keys after they rotate. As a rotation changes no length, either order will do."""
    bias, normed = config.flag("attention_bias", False), rotates and config.flag("use_qk_norm", True)
    mixer = attention(
        config,
        default_theta=500_000.0,
        interleaved=True,
        chunk=_chunk(config) if chunked else None,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=norms(config, _EPS).args.eps if normed else None,
        qk_norm_weights=False,
        query_scaling=None if rotates else _query_scaling(config),
    )
    if not rotates:
        return replace(mixer, args=replace(mixer.args, rope=None))
    if normed and mixer.args.rope is not None and mixer.args.rope.kind in ("yarn", "longrope"):
        raise CheckpointError(
            f"{config.path}: rope type {mixer.args.rope.kind!r} changes the length of queries and keys, which "
            "'use_qk_norm' takes away again here; use rope type 'llama3' or 'default'"
        )
    return mixer


def _query_scaling(config: HFConfig) -> QueryScalingArgs | None:
    """Whether it is on is a number in some configs: any but zero means yes."""
    tuned = config.data.get("attn_temperature_tuning", True)
    if type(tuned) not in (bool, int):
        raise CheckpointError(f"{config.path}: 'attn_temperature_tuning' must be true or false, got {tuned!r}")
    if not tuned:
        return None
    return QueryScalingArgs(config.integer("floor_scale", 8192), config.number("attn_scale", 0.1), offset=1)


def _chunk(config: HFConfig) -> int:
    if config.data.get("attention_chunk_size", 8192) is None:
        raise CheckpointError(f"{config.path}: 'attention_chunk_size' must be a whole number for chunked layers")
    return config.integer("attention_chunk_size", 8192)


def _kinds(config: HFConfig) -> tuple[str, ...]:
    if config.get("layer_types") is None:
        return tuple(_CHUNKED if rotates else _FULL for rotates in rotating_layers(config))
    return layer_kinds(config, "layer_types", (_FULL, _CHUNKED))


def _dense(config: HFConfig) -> Sublayer[MLPArgs]:
    made = mlp(config)
    return Sublayer(
        replace(made.args, intermediate_size=config.integer("intermediate_size_mlp", 16384)), linear_names(_DENSE)
    )


def _mixture(config: HFConfig) -> Sublayer[MoEArgs]:
    """Experts as Meta's checkpoints store them, all in one tensor by columns, or, where quantized, one by one."""
    top_k = config.integer("num_experts_per_tok", 1)  # Transformers' default
    config = replace(config, data={**config.data, "num_experts_per_tok": top_k})
    args = moe_args(
        config, "intermediate_size", renormalize=False, shared_size=config.integer("intermediate_size", 8192)
    )
    args = replace(args, router=replace(args.router, scoring="sigmoid"), weights_on_input=True)
    shared = {
        f"feed_forward.shared_expert.{theirs}": f"shared.{ours}"
        for theirs, ours in (("gate_proj", "gate_up[gate]"), ("up_proj", "gate_up[up]"), ("down_proj", "down"))
    }
    apart = names_of_each_expert(args.router.num_experts, "feed_forward.experts")
    return Sublayer(args, linear_names({"feed_forward.router": "router"} | shared) | apart | _STACKED)


def _mixtures(config: HFConfig) -> tuple[int, ...]:
    """The numbers of the layers that are mixtures of experts."""
    if config.get("moe_layers") is not None:
        return config.numbers("moe_layers")
    step = config.integer("interleave_moe_layer_step", 1)
    return tuple(range(step - 1, num_layers(config), step))
