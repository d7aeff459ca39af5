"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv:2405.04434)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, decoder, linear_names, mlp, norms, num_layers
from hardpoint.models.mixture import expert_names, moe_args, num_experts
from hardpoint.ops.rope_table import rope_args, yarn_growth
from hardpoint_plugin_api import CheckpointError, MLAArgs, MoEArgs, RouterArgs

_MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_LINEARS = {
    "mlp.gate": "router",
    "mlp.shared_experts.gate_proj": "shared.gate_up[gate]",
    "mlp.shared_experts.up_proj": "shared.gate_up[up]",
    "mlp.shared_experts.down_proj": "shared.down",
}
_NORM_EPS = 1e-6
"""Of the norms of compressed queries and of latents: the config's epsilon is that of the others alone."""
_METHODS = ("greedy", "group_limited_greedy")


def deepseek_v2(config: HFConfig) -> CausalLMArgs:
    """Latent attention in every layer; mixtures of experts, with shared ones, behind the first few dense layers."""
    if config.flag("mlp_bias", False):
        raise CheckpointError(f"{config.path}: 'mlp_bias' must be false: shared experts have no biases here")
    mixer, dense, norm = latent_attention(config), mlp(config), norms(config)
    layers = _sparse_layers(config)
    sparse = _mixture(config) if any(layers) else dense
    feed_forwards = [sparse if is_sparse else dense for is_sparse in layers]
    return decoder(config, [Block(mixer, feed_forward, norm) for feed_forward in feed_forwards])


def latent_attention(config: HFConfig) -> Sublayer[MLAArgs]:
    """Multi-head latent attention; queries are compressed unless ``q_lora_rank`` is null, as in V2-Lite."""
    rope_size, nope_size = config.integer("qk_rope_head_dim", 64), config.integer("qk_nope_head_dim", 128)
    rope = rope_args(config.data, rope_size, interleaved=True, file=str(config.path))
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


def _mixture(config: HFConfig) -> Sublayer[MoEArgs]:
    args = _moe_args(config)
    linears = {name: slot for name, slot in _LINEARS.items() if args.shared_size or not slot.startswith("shared.")}
    return Sublayer(args, linear_names(linears) | expert_names(num_experts(config), "mlp.experts", _MATRICES))


def _moe_args(config: HFConfig) -> MoEArgs:
    method, scoring = config.get("topk_method", "greedy"), config.get("scoring_func", "softmax")
    if method not in _METHODS or scoring != "softmax":
        raise CheckpointError(
            f"{config.path}: DeepSeek-V2 routes by scoring_func 'softmax' and topk_method {' or '.join(_METHODS)}, "
            f"got {scoring!r} and {method!r}"
        )
    width, shared = config.integer("moe_intermediate_size"), config.data.get("n_shared_experts", 2)
    renormalize = config.flag("norm_topk_prob", False) and config.integer("num_experts_per_tok") > 1
    args = moe_args(
        config,
        "moe_intermediate_size",
        renormalize=renormalize,
        shared_size=0 if shared in (None, 0) else width * config.integer("n_shared_experts", 2),
    )
    # As DeepSeek's own code: weights are scaled where they are not made to add up to one.
    scaling = 1.0 if renormalize else config.number("routed_scaling_factor", 1.0)
    router = replace(args.router, scaling=scaling)
    return replace(args, router=_grouped(config, router) if method == "group_limited_greedy" else router)


def _grouped(config: HFConfig, router: RouterArgs) -> RouterArgs:
    groups, best = config.integer("n_group"), config.integer("topk_group")
    if router.num_experts % groups or best > groups or router.top_k > best * (router.num_experts // groups):
        raise CheckpointError(
            f"{config.path}: {router.top_k} experts of the best {best} ('topk_group') of {groups} groups ('n_group') "
            f"of {router.num_experts} experts cannot be chosen; groups must divide the experts, and hold enough of them"
        )
    return replace(router, num_groups=groups, top_groups=best)


def _sparse_layers(config: HFConfig) -> tuple[bool, ...]:
    """Which layers are mixtures: each ``moe_layer_freq``-th from ``first_k_dense_replace`` on; none without experts."""
    if config.data.get("n_routed_experts", 64) is None:  # null is a value here
        return (False,) * num_layers(config)
    first, frequency = config.get("first_k_dense_replace", 0), config.integer("moe_layer_freq", 1)
    if type(first) is not int or first < 0:
        raise CheckpointError(
            f"{config.path}: 'first_k_dense_replace' must be a whole number, 0 or more, got {first!r}"
        )
    return tuple(i >= first and i % frequency == 0 for i in range(num_layers(config)))
