"""gpt-oss (OpenAI 2025, arXiv:2508.10925), with weights that are not quantized."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, attention, decoder, linear_names, norms, windows
from hardpoint.models.mixture import moe_args
from hardpoint_plugin_api import MoEArgs

_EXPERTS = {
    "mlp.experts.gate_up_proj": "experts.w13.weight[interleaved,transposed]",
    "mlp.experts.gate_up_proj_bias": "experts.w13.bias[interleaved]",
    "mlp.experts.down_proj": "experts.w2.weight[transposed]",
    "mlp.experts.down_proj_bias": "experts.w2.bias",
}


def gpt_oss(config: HFConfig) -> CausalLMArgs:
    """Attention sinks, sliding windows in every other layer, and experts with biases and a clamped gate in all."""
    bias, norm = config.flag("attention_bias", True), norms(config, default_eps=1e-5)
    sparse = moe_args(config, "intermediate_size", renormalize=True)  # as the softmax over those chosen
    experts = replace(
        sparse,
        router=replace(sparse.router, linear_bias=True),
        activation="swiglu_oai",
        bias=True,
        swiglu_alpha=config.number("swiglu_alpha", MoEArgs.swiglu_alpha),
        swiglu_limit=config.number("swiglu_limit", MoEArgs.swiglu_limit),
    )
    names = linear_names({"mlp.router": "router"}, bias=True) | _EXPERTS | _apart(sparse.router.num_experts)
    feed_forward = Sublayer(experts, names)
    blocks = []
    for window in windows(config):
        mixer = attention(config, default_theta=150_000.0, qkv_bias=bias, out_bias=bias, window=window, sinks=True)
        blocks.append(Block(mixer, feed_forward, norm))
    return decoder(config, blocks)


def _apart(experts: int) -> dict[str, str]:
    """Names of tensors of one expert each, as they are made of files that hold gate and up apart."""
    names = {}
    for e in range(experts):
        for tensor in ("weight", "bias"):
            names[f"mlp.experts.{e}.gate_proj.{tensor}"] = f"experts.w13.{tensor}[{e}.gate]"
            names[f"mlp.experts.{e}.up_proj.{tensor}"] = f"experts.w13.{tensor}[{e}.up]"
            names[f"mlp.experts.{e}.down_proj.{tensor}"] = f"experts.w2.{tensor}[{e}]"
    return names
