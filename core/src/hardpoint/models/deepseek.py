"""Parts that DeepSeek's models share with others: latent attention, mixtures behind a few dense layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.models.decoder import Sublayer, layer_kinds, linear_names, num_layers
from hardpoint.models.mixture import expert_names, moe_args, num_experts
from hardpoint.ops.rope_table import rope_args, yarn_growth
from hardpoint_plugin_api import CheckpointError, MLAArgs, MoEArgs, RouterArgs, SparseIndexerArgs

_MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_SHARED = {
    "mlp.shared_experts.gate_proj": "shared.gate_up[gate]",
    "mlp.shared_experts.up_proj": "shared.gate_up[up]",
    "mlp.shared_experts.down_proj": "shared.down",
}
_NORM_EPS = 1e-6
"""Of the norms of compressed queries and of latents: the config's epsilon is that of the others alone."""


def latent_attention(config: HFConfig) -> Sublayer[MLAArgs]:
    """Multi-head latent attention; queries are compressed unless ``q_lora_rank`` is null, as in V2-Lite.

    YaRN's ``mscale_all_dim`` multiplies the softmax scale: once for queries and once for keys. The rotary table carries
    the ratio of ``mscale`` and ``mscale_all_dim``, as in other models.
    """
    rope_size, nope_size = config.integer("qk_rope_head_dim", 64), config.integer("qk_nope_head_dim", 128)
    interleaved = config.flag("rope_interleave", True)
    rope = rope_args(config.data, rope_size, interleaved=interleaved, file=str(config.path))
    scaling = dict(rope.scaling)
    grown = yarn_growth(scaling["factor"], scaling.get("mscale_all_dim", 0.0)) if rope.kind == "yarn" else 1.0
    compressed = config.data.get("q_lora_rank", 1536) is not None  # null is a value here
    bias = config.flag("attention_bias", False)
    args = MLAArgs(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        latent_size=config.integer("kv_lora_rank", 512),
        rope_size=rope_size,
        nope_size=nope_size,
        value_size=config.integer("v_head_dim", 128),
        scale=(nope_size + rope_size) ** -0.5 * grown**2,
        rope=rope,
        query_rank=config.integer("q_lora_rank", 1536) if compressed else None,
        bias=bias,
        norm_eps=_NORM_EPS,
    )
    names = {
        "self_attn.kv_a_layernorm.weight": "latent_norm",
        **linear_names({"self_attn.kv_b_proj": "kv_up"}),
        **linear_names({"self_attn.o_proj": "out"}, bias=bias),
    }
    if compressed:
        down = {"self_attn.q_a_proj": "down[q]", "self_attn.kv_a_proj_with_mqa": "down[kv]"}
        names |= linear_names(down, bias=bias) | linear_names({"self_attn.q_b_proj": "q"})
        names["self_attn.q_a_layernorm.weight"] = "q_norm"
    else:
        names |= linear_names({"self_attn.kv_a_proj_with_mqa": "down"}, bias=bias)
        names |= linear_names({"self_attn.q_proj": "q"})
    return Sublayer(args, names)


def sparse_latent_attention(config: HFConfig, defaults: Mapping[str, Any], *, interleaved: bool) -> Sublayer[MLAArgs]:
    """Latent attention to the positions that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556).

    ``interleaved`` says which elements of index queries and keys rotate together. Scores are those of Transformers:
    DeepSeek's own code also turns both by a Hadamard matrix, which changes no product, and rounds them to 8 bits.
    ``defaults`` are the family's, for keys that its configs leave out.
    """
    for key in ("q_lora_rank", "rope_interleave"):
        if key in config.data and config.data[key] in (None, False):
            raise CheckpointError(f"{config.path}: {key!r} must not be {json.dumps(config.data[key])} in this model")
    dense = latent_attention(config)
    args, top_k = dense.args, config.integer("index_topk", 2048)
    assert args.query_rank is not None
    assert args.rope is not None
    indexer = SparseIndexerArgs(
        hidden_size=args.hidden_size,
        query_rank=args.query_rank,
        num_heads=config.integer("index_n_heads", defaults["index_n_heads"]),
        head_size=config.integer("index_head_dim", 128),
        top_k=top_k,
        rope=replace(args.rope, interleaved=interleaved),
    )
    if indexer.head_size < args.rope_size:
        raise CheckpointError(
            f"{config.path}: 'index_head_dim' must be at least 'qk_rope_head_dim', got {indexer.head_size} and "
            f"{args.rope_size}"
        )
    linears = {"self_attn.indexer.wq_b": "indexer.q", "self_attn.indexer.wk": "indexer.k"}
    names = {
        **linear_names(linears),
        "self_attn.indexer.k_norm.weight": "indexer.key_norm",
        "self_attn.indexer.k_norm.bias": "indexer.key_norm_bias",
        "self_attn.indexer.weights_proj.weight": "indexer.head_weights",
    }
    return Sublayer(replace(args, top_k=top_k, indexer=indexer), {**dense.names, **names})


def mixture(config: HFConfig, *, renormalize: bool, num_shared: int) -> Sublayer[MoEArgs]:
    """Routed experts, and ``num_shared`` experts as one feed-forward that serves every token."""
    if config.flag("mlp_bias", False):
        raise CheckpointError(f"{config.path}: 'mlp_bias' must be false: shared experts have no biases here")
    width = config.integer("moe_intermediate_size")
    args = moe_args(config, "moe_intermediate_size", renormalize=renormalize, shared_size=width * num_shared)
    linears = {"mlp.gate": "router"} | (_SHARED if num_shared else {})
    return Sublayer(args, linear_names(linears) | expert_names(num_experts(config), "mlp.experts", _MATRICES))


def bias_corrected_mixture(config: HFConfig, defaults: Mapping[str, Any]) -> Sublayer[MoEArgs]:
    """The mixture of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), which GLM-4.5 has, too.

    Scores are sigmoids, a correction bias is added for the choice, and weights are scaled whether they are renormalised
    or not. ``defaults`` are the family's, for keys that its configs leave out.
    """
    for key, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if config.get(key, only) != only:
            raise CheckpointError(f"{config.path}: {key!r} must be {only!r} in this model, got {config.get(key)!r}")
    found = mixture(
        config,
        renormalize=config.flag("norm_topk_prob", True),
        num_shared=config.integer("n_shared_experts", 1),
    )
    router = replace(
        found.args.router,
        scoring="sigmoid",
        bias=True,
        scaling=config.number("routed_scaling_factor", defaults["routed_scaling_factor"]),
    )
    router = grouped(config, router, defaults["n_group"], defaults["topk_group"])
    names = {**found.names, "mlp.gate.e_score_correction_bias": "correction_bias"}
    return Sublayer(replace(found.args, router=router), names)


def grouped(config: HFConfig, router: RouterArgs, groups: int | None = None, best: int | None = None) -> RouterArgs:
    """``router`` with the config's groups of experts; the numbers given are the family's defaults."""
    groups = config.integer("n_group", *(() if groups is None else (groups,)))
    best = config.integer("topk_group", *(() if best is None else (best,)))
    if router.num_experts % groups or best > groups or router.top_k > best * (router.num_experts // groups):
        raise CheckpointError(
            f"{config.path}: {router.top_k} experts of the best {best} ('topk_group') of {groups} groups ('n_group') "
            f"of {router.num_experts} experts cannot be chosen; groups must divide the experts, and hold enough of them"
        )
    return replace(router, num_groups=groups, top_groups=best)


def layers_with_experts(config: HFConfig, default: int) -> tuple[bool, ...]:
    """Which layers are mixtures of experts: those that ``mlp_layer_types`` calls sparse, or else each
    ``moe_layer_freq``-th from ``first_k_dense_replace`` on.
    """
    if config.get("mlp_layer_types") is not None:
        return tuple(kind == "sparse" for kind in layer_kinds(config, "mlp_layer_types", ("dense", "sparse")))
    first, frequency = config.get("first_k_dense_replace", default), config.integer("moe_layer_freq", 1)
    if type(first) is not int or first < 0:
        raise CheckpointError(
            f"{config.path}: 'first_k_dense_replace' must be a whole number, 0 or more, got {first!r}"
        )
    return tuple(i >= first and i % frequency == 0 for i in range(num_layers(config)))


def multi_token_prediction(config: HFConfig) -> dict[str, None]:
    """Names of the layers behind the last one, which predict further tokens (arXiv:2412.19437, section 2.2).

    They serve speculation alone, and no drafter here uses them: their tensors may be there, and are not read.
    """
    key = "num_nextn_predict_layers" if config.get("num_nextn_predict_layers") is not None else "num_mtp_layers"
    count = config.get(key, 1)
    if type(count) is not int or count < 0:
        raise CheckpointError(f"{config.path}: {key!r} must be a whole number, 0 or more, got {count!r}")
    layers = num_layers(config)
    return {f"model.layers.{number}.*": None for number in range(layers, layers + count)}
