"""Mixtral (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, attention, decoder, linear_names, norms, num_layers
from hardpoint.models.mixture import expert_names, moe_args, num_experts

_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
_ROUTER = {
    "mlp.gate": "router",  # as Transformers 5 calls it in memory
    "block_sparse_moe.gate": "router",
}


def mixtral(config: HFConfig) -> CausalLMArgs:
    """Mistral with a mixture of experts in every layer; the weights of a token's experts add up to one."""
    block = Block(
        mixer=attention(config, default_theta=1e6, window=config.get("sliding_window")),
        feed_forward=Sublayer(
            moe_args(config, "intermediate_size", renormalize=True),
            linear_names(_ROUTER) | expert_names(num_experts(config), "block_sparse_moe.experts", _MATRICES),
        ),
        norms=norms(config, default_eps=1e-5),
    )
    return decoder(config, [block] * num_layers(config))
