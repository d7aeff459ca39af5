"""Qwen3-Next: gated delta nets, gated attention in each fourth layer, and a mixture of experts in each.

The design is described in the report of its authors (Qwen Team 2025, https://qwen.ai/blog, "Qwen3-Next: Towards
Ultimate Training & Inference Efficiency").
"""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.reading import Address, Grouped
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, decoder, mlp, norms, zero_centred
from hardpoint.models.deepseek import multi_token_prediction
from hardpoint.models.gated_delta import (
    FULL,
    MULTI_TOKEN_PREDICTION,
    gated_attention,
    gated_delta_net,
    gated_delta_net_args,
    hybrid_layers,
)
from hardpoint.models.mixture import mixture_with_shared_expert, sparse_layers
from hardpoint_plugin_api import GatedDeltaNetArgs


def qwen3_next(config: HFConfig) -> CausalLMArgs:
    """Layers by ``layer_types``; some may have a plain feed-forward, as in Qwen3-MoE."""
    args = gated_delta_net_args(config)
    linear, full = gated_delta_net(args, _by_key_head(args)), gated_attention(config)
    kinds, is_sparse = hybrid_layers(config), sparse_layers(config)
    norm, dense = norms(config), None if all(is_sparse) else mlp(config)
    sparse = mixture_with_shared_expert(config, renormalize=config.flag("norm_topk_prob", True))
    blocks = [
        Block(full if kind == FULL else linear, sparse if dense is None or one_is_sparse else dense, norm)
        for kind, one_is_sparse in zip(kinds, is_sparse, strict=True)
    ]
    model = zero_centred(decoder(config, blocks))
    unneeded = MULTI_TOKEN_PREDICTION
    if config.get("num_nextn_predict_layers") is not None:  # GGUF files have such layers behind the others
        unneeded = unneeded | multi_token_prediction(config)
    return replace(model, weight_names={**model.weight_names, **unneeded})


def _by_key_head(args: GatedDeltaNetArgs) -> dict[str, Address]:
    """Projections whose rows are stored key head by key head, with all that belongs to it."""
    each = args.num_heads // args.num_key_heads
    values = each * args.value_size
    qkvz = (
        *(("qkv.weight[q]", args.key_size), ("qkv.weight[k]", args.key_size)),
        *(("qkv.weight[v]", values), ("z.weight", values)),
    )
    return {
        "in_proj_qkvz.weight": Grouped(args.num_key_heads, qkvz),
        "in_proj_ba.weight": Grouped(args.num_key_heads, (("ba.weight[b]", each), ("ba.weight[a]", each))),
    }
