"""Config keys and tensor names that the decoder families share in Hugging Face's format.

A family makes each sub-layer's arguments together with the names of its tensors. Blocks and models add prefixes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.reading import Address, under
from hardpoint.layers import CausalLMArgs, ModelFacts
from hardpoint.ops.activation import activation_of_hf
from hardpoint.ops.rope_table import extended_length, rope_args
from hardpoint_plugin_api import (
    AdjustedArgs,
    AttentionArgs,
    BlockArgs,
    CheckpointError,
    EmbeddingArgs,
    LayerArgs,
    MLPArgs,
    NormArgs,
    QueryScalingArgs,
)

_Args = TypeVar("_Args", covariant=True)
_LAYER_TYPES = ("full_attention", "sliding_attention")
_STORED_LESS_ONE = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
_WINDOW = 4096


@dataclass(frozen=True)
class Sublayer(Generic[_Args]):
    """A sub-layer's arguments, and its tensors: name within a layer of the checkpoint -> slot within the sub-layer.

    Where several tensors fill the same slot, a checkpoint needs one of them.
    """

    args: _Args
    names: Mapping[str, Address]


@dataclass(frozen=True)
class Block:
    """One block. ``norms`` name its norms: the slots mixer_norm.weight and, with a feed-forward,
    feed_forward_norm.weight. Without ``pre_norm`` it has none; ``norms`` are then named nowhere, and give epsilon."""

    mixer: Sublayer[LayerArgs]
    feed_forward: Sublayer[LayerArgs] | None
    norms: Sublayer[NormArgs]
    pre_norm: bool = True

    @property
    def args(self) -> BlockArgs:
        """Arguments of the layer."""
        feed_forward = None if self.feed_forward is None else self.feed_forward.args
        return BlockArgs(self.mixer.args, feed_forward, self.norms.args, self.pre_norm)

    @property
    def names(self) -> dict[str, Address]:
        """Name within a layer of the checkpoint -> slot within the block."""
        parts = (("mixer.", self.mixer), ("feed_forward.", self.feed_forward), ("", self.norms))
        return {name: under(prefix, slot) for prefix, part in parts if part for name, slot in part.names.items()}


def decoder(config: HFConfig, blocks: Sequence[Block], *, default_tied: bool = False) -> CausalLMArgs:
    """The model around ``blocks``: embedding, a last norm like theirs, head (tied where the config says so).

    ``default_tied`` is the family's own, for configs that leave it out.
    """
    tied = config.flag("tie_word_embeddings", default_tied)
    names: dict[str, Address | None] = {"model.norm.weight": "norm.weight"}
    for i, block in enumerate(blocks):
        for name, slot in block.names.items():
            names[f"model.layers.{i}.{name}"] = under(f"stack.blocks.{i}.", slot)
    if tied:
        names |= {"model.embed_tokens.weight": "head.linear.weight", "lm_head.weight": None}
    else:
        names |= {"model.embed_tokens.weight": "embedding.weight", "lm_head.weight": "head.linear.weight"}
    return CausalLMArgs(
        embedding=EmbeddingArgs(config.integer("vocab_size"), config.integer("hidden_size")),
        blocks=tuple(block.args for block in blocks),
        norm=blocks[-1].norms.args,
        tied=tied,
        weight_names=names,
        facts=facts(config),
    )


def renamed(model: CausalLMArgs, modules: Mapping[str, str]) -> CausalLMArgs:
    """``model`` with other names of ``modules``, which begin names of tensors: {"model.norm.": "model.last_norm."}."""

    def name_of(name: str) -> str:
        for ours, theirs in modules.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    return replace(model, weight_names={name_of(name): slot for name, slot in model.weight_names.items()})


def zero_centred(model: CausalLMArgs) -> CausalLMArgs:
    """``model`` where the weights of norms are stored less one: those of blocks, of queries and keys, and the last."""
    names = {
        name: f"{slot}[plus_one]" if isinstance(slot, str) and name.endswith(_STORED_LESS_ONE) else slot
        for name, slot in model.weight_names.items()
    }
    return replace(model, weight_names=names)


def language_model(model: CausalLMArgs) -> CausalLMArgs:
    """``model`` as the language model of a checkpoint that also has a vision tower, whose tensors are left out."""
    model = renamed(model, {"model.": "model.language_model."})
    return replace(model, weight_names={**model.weight_names, "model.visual.*": None})


def part_named(model: CausalLMArgs, name: str, *, other_parts: Sequence[str]) -> CausalLMArgs:
    """``model`` as the part ``name`` of a checkpoint, its head included, whose ``other_parts`` are left out."""
    model = renamed(model, {"model.": f"{name}.model.", "lm_head.": f"{name}.lm_head."})
    return replace(model, weight_names={**model.weight_names, **{f"{part}.*": None for part in other_parts}})


def facts(config: HFConfig) -> ModelFacts:
    """Positions by ``max_position_embeddings``. A larger ``max_model_len`` is accepted where YaRN was configured for
    it.

    Configs may leave that key at the length that YaRN extends, as Qwen's model cards have it.
    """
    longest, key = config.integer("max_position_embeddings"), "max_position_embeddings"
    most = extended_length(config.data, str(config.path)) or 0
    if most > longest:
        key = "yarn's factor times original_max_position_embeddings"
    limit, hidden_size = f"{key} in its config.json", config.integer("hidden_size")
    return ModelFacts(config.integer("vocab_size"), longest, max(longest, most), limit, hidden_size)


def linear_names(modules: Mapping[str, str], *, bias: bool = False) -> dict[str, str]:
    """Names of linear layers' tensors. ``modules`` maps modules of the checkpoint to layers: {"q_proj": "qkv[q]"}."""
    names = {}
    for module, place in modules.items():
        layer, bracket, part = place.partition("[")
        for tensor in ("weight", "bias") if bias else ("weight",):
            names[f"{module}.{tensor}"] = f"{layer}.{tensor}{bracket}{part}"
    return names


def num_layers(config: HFConfig) -> int:
    """The number of blocks."""
    return config.integer("num_hidden_layers")


class AttentionVariations(TypedDict, total=False):
    """Where families differ; fields of AttentionArgs."""

    qkv_bias: bool
    out_bias: bool
    qk_norm_eps: float | None
    window: int | None
    sinks: bool
    soft_cap: float | None
    output_gate: bool
    chunk: int | None
    qk_norm_weights: bool
    query_scaling: QueryScalingArgs | None


def attention(
    config: HFConfig,
    *,
    default_theta: float = 10_000.0,
    default_rotary: float = 1.0,
    layer_type: str | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    **variations: Unpack[AttentionVariations],
) -> Sublayer[AttentionArgs]:
    """Grouped-query attention with rotary embedding.

    ``default_theta``, and ``default_rotary`` (the share of a head that rotates), are the family's own, for configs that
    leave them out. ``layer_type`` chooses among rotary embeddings, and ``interleaved`` is how they pair elements: see
    rope_args. ``scale`` None: one over the root of the head size.
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
    rope = rope_args(
        config.data,
        head_size,
        default_theta=default_theta,
        default_rotary=default_rotary,
        layer_type=layer_type,
        interleaved=interleaved,
        file=str(config.path),
    )
    args = AttentionArgs(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5 if scale is None else scale,
        rope=rope,
        **variations,
    )
    names: dict[str, Address] = {
        **linear_names({f"self_attn.{x}_proj": f"qkv[{x}]" for x in "qkv"}, bias=args.qkv_bias)
    }
    names |= linear_names({"self_attn.o_proj": "out"}, bias=args.out_bias)
    if args.qk_norm_eps is not None and args.qk_norm_weights:
        names |= {"self_attn.q_norm.weight": "q_norm", "self_attn.k_norm.weight": "k_norm"}
    if args.sinks:
        names["self_attn.sinks"] = "sinks"
    return Sublayer(args, names)


def norms(
    config: HFConfig, default_eps: float = 1e-6, *, feed_forward: str = "post_attention_layernorm"
) -> Sublayer[NormArgs]:
    """The norms of the residual stream. ``feed_forward``: the module of the one before the feed-forward."""
    args = NormArgs(config.integer("hidden_size"), config.number("rms_norm_eps", default_eps))
    names = {"input_layernorm.weight": "mixer_norm.weight", f"{feed_forward}.weight": "feed_forward_norm.weight"}
    return Sublayer(args, names)


def adjusted(
    inner: Sublayer[LayerArgs], *, norm: NormArgs | None = None, module: str = "", multiplier: float = 1.0
) -> Sublayer[LayerArgs]:
    """``inner`` with a ``norm`` of its result, whose weight ``module`` has in the checkpoint, or with a multiplier."""
    names = {name: under("inner.", slot) for name, slot in inner.names.items()}
    if norm is not None:
        names[f"{module}.weight"] = "norm.weight"
    return Sublayer(AdjustedArgs(inner.args, norm, multiplier), names)


def mlp(
    config: HFConfig,
    bias: bool = False,
    *,
    activation: str = "hidden_act",
    default_activation: str = "silu",
    fused: bool = False,
) -> Sublayer[MLPArgs]:
    """A gated feed-forward. ``activation``: the key of its activation; ``fused``: gate and up are one tensor."""
    args = MLPArgs(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        activation=activation_of_hf(str(config.get(activation, default_activation)), f"It stands in {config.path}."),
        bias=bias,
    )
    modules = {"mlp.gate_proj": "gate_up[gate]", "mlp.up_proj": "gate_up[up]", "mlp.down_proj": "down"}
    if fused:
        modules = {"mlp.gate_up_proj": "gate_up", "mlp.down_proj": "down"}
    return Sublayer(args, linear_names(modules, bias=bias))


def sliding_window(config: HFConfig) -> Any:
    """``sliding_window`` as it stands. Null means none; configs that leave the key out mean Transformers' default."""
    return config.data.get("sliding_window", _WINDOW)


def windows(config: HFConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, from ``layer_types`` or, before that key, ``max_window_layers``."""
    layers = num_layers(config)
    window = sliding_window(config) if config.flag("use_sliding_window", False) else None
    if config.get("layer_types") is None:
        first = config.get("max_window_layers", layers)
        if type(first) is not int or first < 0:
            raise CheckpointError(
                f"{config.path}: 'max_window_layers' must be a whole number, 0 or more, got {first!r}"
            )
        return tuple(window if i >= first else None for i in range(layers))
    kinds = layer_types(config, ())
    if window is None and "sliding_attention" in kinds:
        window = config.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rotating_layers(config: HFConfig) -> tuple[bool, ...]:
    """Whether each layer rotates. ``no_rope_layers`` has 1 for those that do; without it, each fourth does not."""
    layers, given = num_layers(config), config.get("no_rope_layers")
    if not given:
        every = config.integer("no_rope_layer_interval", 4)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if not isinstance(given, list) or len(given) != layers or any(each not in (0, 1) for each in given):
        raise CheckpointError(
            f"{config.path}: 'no_rope_layers' must have 0 or 1 for each of {layers} layers, got {given}"
        )
    return tuple(bool(each) for each in given)


def layer_types(config: HFConfig, default: Sequence[str]) -> tuple[str, ...]:
    """``full_attention`` or ``sliding_attention`` for each layer; ``default`` where the config leaves it out."""
    if config.get("layer_types") is None:
        return tuple(default)
    return layer_kinds(config, "layer_types", _LAYER_TYPES)


def layer_kinds(config: HFConfig, key: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The list ``key``, which names one of ``kinds`` for each layer."""
    found, count = config.get(key), num_layers(config)
    if not isinstance(found, list) or len(found) != count or any(kind not in kinds for kind in found):
        raise CheckpointError(
            f"{config.path}: {key!r} must name {count} layers, each {' or '.join(kinds)}; got {found}"
        )
    return tuple(found)
