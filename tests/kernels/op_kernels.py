"""The kernels of ops around matmuls, and their inputs wherever those may lie."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hardpoint.conformance.memory import Placement, place
from hardpoint.kernels import activation, lora, norm, quantize, rope_store, routing, step_inputs
from hardpoint.ops.base import Case

MODULES = {
    activation: ("activation", "act_and_mul", "act_and_mul_quantized"),
    lora: ("add_lora",),
    norm: ("rms_norm", "add_rms_norm", "rms_norm_quantized", "add_rms_norm_quantized"),
    quantize: ("quantize_rows",),
    rope_store: ("rotary_embedding", "store_kv", "qk_norm_rope_store"),
    routing: ("route_topk", "grouped_topk", "topk_softmax", "topk_sigmoid", "moe_permute", "moe_unpermute"),
    step_inputs: ("slot_mapping", "decode_inputs", "embedding_lookup"),
}
KERNELS = [(name, getattr(module, name)) for module, names in MODULES.items() for name in names]


def placed(op: Any, case: Case, placement: Placement) -> Case:
    """``case`` with its inputs so placed; what the op writes to lies as drawn."""

    def move(value: Any, where: Placement) -> Any:
        if isinstance(value, Mapping):
            return {name: move(x, where) for name, x in value.items()}
        return place(value, value.device, where) if isinstance(value, torch.Tensor) else value

    arguments = inspect.signature(op.reference).bind(*case.args, **case.kwargs)
    for name, value in arguments.arguments.items():
        arguments.arguments[name] = move(value, Placement.AS_DRAWN if name in op.mutates else placement)
    return replace(case, args=arguments.args, kwargs=arguments.kwargs)
