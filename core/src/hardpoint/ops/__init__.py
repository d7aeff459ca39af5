"""Named pure ops: one file each, with signature, reference, cases and error model.

Layers import the ops they use. ``get`` and ``names`` are for those who come with a name: the conformance kit, the
benchmarks, ``hardpoint ops``. Importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from hardpoint_plugin_api import UnknownNameError

if TYPE_CHECKING:
    from hardpoint.ops.base import CustomOp

__all__ = ["get", "names"]

_HOMES = {
    "act_and_mul": "act_and_mul",
    "act_and_mul_quantized": "act_and_mul",
    "activation": "activation",
    "add_lora": "add_lora",
    "add_rms_norm": "add_rms_norm",
    "add_rms_norm_quantized": "add_rms_norm",
    "allreduce_add_rms_norm": "allreduce_add_rms_norm",
    "apply_logit_bias": "apply_logit_bias",
    "apply_penalties": "apply_penalties",
    "argmax_tokens": "sampling",
    "causal_conv": "causal_conv",
    "decode_inputs": "decode_inputs",
    "embedding_lookup": "embedding_lookup",
    "gated_rms_norm": "gated_rms_norm",
    "grouped_topk": "grouped_topk",
    "index_scores": "index_scores",
    "keep_tokens": "keep_tokens",
    "linear_recurrence_chunks": "linear_recurrence",
    "linear_recurrence_step": "linear_recurrence",
    "mask_tokens": "mask_tokens",
    "merge_attention": "varlen_attention",
    "moe_permute": "moe_permute",
    "moe_unpermute": "moe_unpermute",
    "multiply_heads": "multiply_heads",
    "philox_uniform": "sampling",
    "qk_norm_rope_store": "qk_norm_rope_store",
    "quantize_rows": "quantize_rows",
    "recurrence_gates": "recurrence_gates",
    "rms_norm": "rms_norm",
    "rms_norm_quantized": "rms_norm",
    "rotary_embedding": "rotary_embedding",
    "route_topk": "route_topk",
    "sample_tokens": "sampling",
    "slot_mapping": "slot_mapping",
    "store_index_keys": "store_index_keys",
    "store_kv": "store_kv",
    "token_logprobs": "token_logprobs",
    "topk_positions": "topk_positions",
    "topk_sigmoid": "topk_sigmoid",
    "topk_softmax": "topk_softmax",
    "varlen_attention": "varlen_attention",
    "verify_drafts": "verify_drafts",
}


def names() -> tuple[str, ...]:
    """Every op's name, sorted."""
    return tuple(sorted(_HOMES))


def get(name: str) -> CustomOp[..., Any]:
    """The op called ``name``; imports its file. Raises UnknownNameError with the nearest name."""
    if name not in _HOMES:
        raise UnknownNameError("op", name, _HOMES)
    return cast("CustomOp[..., Any]", getattr(import_module(f"hardpoint.ops.{_HOMES[name]}"), name))
