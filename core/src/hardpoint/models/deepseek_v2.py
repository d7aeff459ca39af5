"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv:2405.04434)."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, decoder, mlp, norms, num_layers
from hardpoint.models.deepseek import grouped, latent_attention, layers_with_experts, mixture
from hardpoint_plugin_api import CheckpointError, MoEArgs

_METHODS = ("greedy", "group_limited_greedy")


def deepseek_v2(config: HFConfig) -> CausalLMArgs:
    """Latent attention in every layer; mixtures of experts, with shared ones, behind the first few dense layers."""
    mixer, dense, norm = latent_attention(config), mlp(config), norms(config)
    has_experts = config.data.get("n_routed_experts", 64) is not None  # null is a value here
    layers = layers_with_experts(config, 0) if has_experts else (False,) * num_layers(config)
    sparse = _mixture(config) if any(layers) else dense
    return decoder(config, [Block(mixer, sparse if is_sparse else dense, norm) for is_sparse in layers])


def _mixture(config: HFConfig) -> Sublayer[MoEArgs]:
    method, scoring = config.get("topk_method", "greedy"), config.get("scoring_func", "softmax")
    if method not in _METHODS or scoring != "softmax":
        raise CheckpointError(
            f"{config.path}: DeepSeek-V2 routes by scoring_func 'softmax' and topk_method {' or '.join(_METHODS)}, "
            f"got {scoring!r} and {method!r}"
        )
    has_shared = config.data.get("n_shared_experts", 2) not in (None, 0)
    renormalize = config.flag("norm_topk_prob", False) and config.integer("num_experts_per_tok") > 1
    num_shared = config.integer("n_shared_experts", 2) if has_shared else 0
    found = mixture(config, renormalize=renormalize, num_shared=num_shared)
    # As DeepSeek's own code: weights are scaled where they are not made to add up to one.
    scaling = 1.0 if renormalize else config.number("routed_scaling_factor", 1.0)
    router = replace(found.args.router, scaling=scaling)
    router = grouped(config, router) if method == "group_limited_greedy" else router
    return Sublayer(replace(found.args, router=router), found.names)
