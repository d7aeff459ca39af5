"""Checkpoints whose weights are in a format, written from small random models; and checkpoints changed afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.checkpoints import write_checkpoint

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A module's tensors by name, and its weight in numbers."""


@dataclass(frozen=True)
class Format:
    """``config`` is the quantization_config; ``inputs`` what the format's activations do to a module's input.

    ``metadata`` is the text about each module that the file carries under the name of its weight, if any.
    """

    name: str
    config: Mapping[str, Any]
    write: Callable[[str, torch.Tensor], Stored]
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    skip: tuple[str, ...] = ("lm_head",)
    model: Mapping[str, Any] = field(default_factory=dict)
    metadata: str | None = None

    def __str__(self) -> str:
        return self.name


def write_quantized(folder: Path, form: Format, family: str = "qwen2", **changes: int) -> PreTrainedModel:
    """Write a small random model in ``form`` and return it as Transformers' own, with the numbers that were stored."""
    model = write_checkpoint(folder, family, **{**form.model, **changes})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    weights, metadata = dict(model.named_parameters()), {"format": "pt"}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or any(name.endswith(skipped) for skipped in form.skip):
            continue
        metadata |= {} if form.metadata is None else {f"{name}.weight": form.metadata}
        stored, numbers = form.write(name, tensors.pop(f"{name}.weight").float())
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in stored.items()}
        weights[f"{name}.weight"].data = numbers.float()
        _round_inputs(module, form.inputs)
    save_file(tensors, file, metadata=metadata)
    change_config(folder, quantization_config=dict(form.config))
    return model


def round_weights(
    model: PreTrainedModel,
    weights: Callable[[torch.Tensor], torch.Tensor],
    inputs: Callable[[torch.Tensor], torch.Tensor] | None,
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Replace the weights of linear modules but routers by rounded ones, and round their inputs.

    The output head is rounded by ``head``, and left where that is None; its inputs are rounded where ``head`` is
    ``weights``.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.endswith(".router"):
            continue
        rounding = head if name == "lm_head" else weights
        if rounding is not None:
            module.weight.data = rounding(module.weight.data)
        if rounding is weights:
            _round_inputs(module, inputs)


def _round_inputs(module: torch.nn.Linear, inputs: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    if inputs is not None:
        module.register_forward_pre_hook(lambda _, args: (inputs(args[0]),))


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint, and keep what its file says beside them."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata=metadata)
