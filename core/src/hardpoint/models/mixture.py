"""Parts that decoder families with mixtures of experts share in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, Unpack

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.models.decoder import Sublayer, linear_names, num_layers
from hardpoint.ops.activation import activation_of_hf
from hardpoint_plugin_api import CheckpointError, MoEArgs, RouterArgs


class ExpertsVariations(TypedDict, total=False):
    """The differences between families; fields of MoEArgs."""

    shared_size: int
    shared_gate: bool


def moe_args(config: HFConfig, width: str, *, renormalize: bool, **variations: Unpack[ExpertsVariations]) -> MoEArgs:
    """A mixture routed by softmax; ``width`` is the key of an expert's intermediate size."""
    experts, top_k = num_experts(config), config.integer("num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(
            f"{config.path}: 'num_experts_per_tok' must be at most the number of experts, got {top_k} of {experts}"
        )
    return MoEArgs(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer(width),
        router=RouterArgs(experts, top_k, renormalize=renormalize),
        activation=activation_of_hf(str(config.get("hidden_act", "silu")), f"It stands in {config.path}."),
        **variations,
    )


def num_experts(config: HFConfig) -> int:
    """How many routed experts: families, and versions of Transformers, have keys of their own for it."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return config.integer(next((key for key in keys if config.get(key) is not None), keys[0]))


def sparse_layers(config: HFConfig) -> tuple[bool, ...]:
    """Which layers are mixtures of experts: every ``decoder_sparse_step``-th, but for ``mlp_only_layers``."""
    step, dense = config.integer("decoder_sparse_step", 1), config.numbers("mlp_only_layers")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers(config)))


MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""The names of an expert's matrices in most families."""
_GATED_SHARED = {
    "mlp.gate": "router",
    "mlp.shared_expert.gate_proj": "shared.gate_up[gate]",
    "mlp.shared_expert.up_proj": "shared.gate_up[up]",
    "mlp.shared_expert.down_proj": "shared.down",
    "mlp.shared_expert_gate": "shared_gate",
}


def mixture_with_shared_expert(config: HFConfig, *, renormalize: bool) -> Sublayer[MoEArgs]:
    """Experts, and beside them a gated one that every token goes to, as Qwen2-MoE names their tensors."""
    args = moe_args(
        config,
        "moe_intermediate_size",
        renormalize=renormalize,
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    experts = expert_names(args.router.num_experts, "mlp.experts", MATRICES)
    return Sublayer(args, linear_names(_GATED_SHARED) | experts)


def expert_names(experts: int, folder: str, matrices: Mapping[str, str]) -> dict[str, str]:
    """Names of the experts' tensors within a layer, one for each expert, and of those that hold all experts at once.

    ``folder`` is where experts stand; ``matrices`` says what an expert calls gate, up and down. The second kind is what
    Transformers 5 has in memory, so what a program hands over that trains such a model.
    """
    return names_of_each_expert(experts, folder, matrices) | {
        "mlp.experts.gate_up_proj": "experts.w13.weight",
        "mlp.experts.down_proj": "experts.w2.weight",
    }


def names_of_each_expert(experts: int, folder: str, matrices: Mapping[str, str] = MATRICES) -> dict[str, str]:
    """Names of the experts' tensors within a layer, one for each expert; see expert_names."""
    names = {}
    for e in range(experts):
        names[f"{folder}.{e}.{matrices['gate']}.weight"] = f"experts.w13.weight[{e}.gate]"
        names[f"{folder}.{e}.{matrices['up']}.weight"] = f"experts.w13.weight[{e}.up]"
        names[f"{folder}.{e}.{matrices['down']}.weight"] = f"experts.w2.weight[{e}]"
    return names
