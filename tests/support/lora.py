"""LoRA adapters as PEFT writes them, and Transformers' model with such an adapter merged into its weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    targets: Sequence[str] = (*ATTENTION, *FEED_FORWARD),
    rank: int = 4,
    seed: int = 1,
    size: float = 1.0,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> PreTrainedModel:
    """Write a random adapter for ``targets`` of ``model`` to ``folder``; return a copy of the model with it merged in.

    ``size`` multiplies what it changes. ``tensors`` are more tensors, or None for one that is left out; ``config`` more
    keys of the config. ``rank_pattern`` and ``alpha_pattern`` name modules' last parts.
    """
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    generator = torch.Generator().manual_seed(seed)
    written: dict[str, torch.Tensor] = {}
    merged = copy.deepcopy(model)
    for module, layer in merged.named_modules():
        target = module.rpartition(".")[2]
        if target not in targets:
            continue
        weight = layer.get_parameter("weight")
        r = (config.get("rank_pattern") or {}).get(target, config["r"])
        alpha = (config.get("alpha_pattern") or {}).get(target, config["lora_alpha"])
        a = torch.randn(r, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(weight.shape[0], r, generator=generator) * 0.1 * size
        written[f"base_model.model.{module}.lora_A.weight"] = a
        written[f"base_model.model.{module}.lora_B.weight"] = b
        weight.data += alpha / (math.sqrt(r) if config.get("use_rslora") else r) * (b @ a)
    for name, tensor in (tensors or {}).items():
        if tensor is None:
            del written[name]
        else:
            written[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
