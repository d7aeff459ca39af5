"""The mixer of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) as Hugging Face's hybrids name its tensors."""

from __future__ import annotations

from typing import Any

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.reading import Address
from hardpoint.models.decoder import Sublayer, linear_names
from hardpoint.ops.activation import activation_of_hf
from hardpoint_plugin_api import CheckpointError, Mamba2Args


def mamba2(args: Mamba2Args, module: str) -> Sublayer[Mamba2Args]:
    """The mixer; ``module`` is its name in a layer of the checkpoint. One tensor projects to all that it needs."""
    names: dict[str, Address] = {
        "A_log": "rate",
        "D": "skip",
        "dt_bias": "step_bias",
        "conv1d.weight": "conv",
        "norm.weight": "norm",
        **linear_names({"in_proj": "inputs", "out_proj": "out"}, bias=args.bias),
    }
    if args.conv_bias:
        names["conv1d.bias"] = "conv_bias"
    return Sublayer(args, {f"{module}.{name}": slot for name, slot in names.items()})


def bamba_mixer(config: HFConfig) -> Sublayer[Mamba2Args]:
    """The mixer of Bamba and of Granite's hybrids."""
    hidden, heads = config.integer("hidden_size"), config.integer("mamba_n_heads", 128)
    width, head_size = config.integer("mamba_expand", 2) * hidden, config.get("mamba_d_head", "auto")
    args = Mamba2Args(
        hidden_size=hidden,
        num_heads=heads,
        head_size=width // heads if head_size == "auto" else config.integer("mamba_d_head"),
        num_groups=config.integer("mamba_n_groups", 1),
        state_size=config.integer("mamba_d_state", 256),
        conv_width=config.integer("mamba_d_conv", 4),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        activation=activation_of_hf(str(config.get("hidden_act", "silu")), f"It stands in {config.path}."),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        min_step=_least_step(config),
    )
    return mamba2(checked(config, args), "mamba")


def checked(config: HFConfig, args: Mamba2Args) -> Mamba2Args:
    """``args``. Raises CheckpointError where groups do not divide heads."""
    if args.num_heads % args.num_groups:
        raise CheckpointError(
            f"{config.path}: {args.num_heads} Mamba heads do not divide among {args.num_groups} groups"
        )
    return args


def _least_step(config: HFConfig) -> float:
    """The lower end of ``time_step_limit``, whose upper end must be infinite."""
    limit: Any = config.get("time_step_limit", [0.0, float("inf")])
    low, high = limit if isinstance(limit, list) and len(limit) == 2 else (-1.0, 0.0)
    if type(low) not in (int, float) or low < 0 or high not in (float("inf"), {"__float__": "Infinity"}):
        raise CheckpointError(f"{config.path}: 'time_step_limit' must be a number and infinity, got {limit!r}")
    return float(low)
