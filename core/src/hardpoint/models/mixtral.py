"""Mixtral (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.models.dense_decoder import attention_args, dense_decoder, norm_args, num_layers
from hardpoint.models.moe_decoder import expert_names, moe_args, num_experts
from hardpoint_plugin_api import BlockArgs

_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


def mixtral(ctx: Context, config: HFConfig) -> CausalLM:
    """Mistral with a mixture of experts in every layer; the weights of a token's experts add up to one."""
    block = BlockArgs(
        attention=attention_args(ctx, config, default_theta=1e6, window=config.get("sliding_window")),
        mlp=moe_args(config, "intermediate_size", renormalize=True),
        norm=norm_args(config, default_eps=1e-5),
    )
    names = {
        "mlp.gate.weight": "mlp.router.weight",  # as Transformers 5 calls it in memory
        "block_sparse_moe.gate.weight": "mlp.router.weight",
        **expert_names(num_experts(config), "block_sparse_moe.experts", _MATRICES),
    }
    return dense_decoder(ctx, config, (block,) * num_layers(config), names)
