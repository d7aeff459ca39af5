"""The tensors of a model's code that no layer of ours took over, such as layer norms and position embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.layers.base import PluggableLayer
from hardpoint.models.transformers_code.sharding import TensorPlan
from hardpoint.parallel.shards import even_shard
from hardpoint_plugin_api import ShardPlan, WeightSlot


@dataclass(frozen=True)
class OwnTensor:
    """A parameter, or a buffer that a checkpoint holds, and the places in the model where it stands."""

    places: tuple[tuple[nn.Module, str], ...]
    slot: WeightSlot
    is_buffer: bool = False

    def put(self, tensor: torch.Tensor) -> None:
        """Have the model's code find ``tensor`` here."""
        for module, name in self.places:
            if self.is_buffer:
                module._buffers[name] = tensor
            else:
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


class OwnTensors(PluggableLayer):
    """Slots: one for each tensor, by its name in the model. ``buffers``: what code computed when it was constructed."""

    def __init__(
        self, ctx: Context, tensors: Mapping[str, OwnTensor], buffers: list[tuple[nn.Module, str, torch.Tensor]]
    ) -> None:
        super().__init__(ctx)
        self._tensors, self._buffers_made, self._device = dict(tensors), buffers, ctx.torch_device

    def declare(self) -> dict[str, WeightSlot]:
        return {name: tensor.slot for name, tensor in self._tensors.items()}

    def bind(self) -> None:
        for module, name, value in self._buffers_made:
            module._buffers[name] = value.to(self._device)
        for name, tensor in self._tensors.items():
            tensor.put(self.weights[name])

    def release(self) -> None:
        for tensor in self._tensors.values():
            tensor.put(torch.empty(tensor.slot.shape, dtype=dtype_of(tensor.slot.dtype), device="meta"))
        super().release()


def own_tensors(model: nn.Module, plan: TensorPlan, dtype: torch.dtype, stored: frozenset[str]) -> dict[str, OwnTensor]:
    """The parameters that are left in ``model``, by name, and those of its buffers that are ``stored``.

    A parameter that stands in several places has one slot, by its first name.
    """
    found: dict[int, tuple[str, list[tuple[nn.Module, str]], torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            found.setdefault(id(parameter), (full, [], parameter))[1].append((module, name))
    wide = _in_float32(model, dtype)
    tensors = {}
    for name, places, parameter in found.values():
        shape, shards = list(parameter.shape), tuple[ShardPlan, ...]()
        if plan.named(name.removesuffix(".weight").removesuffix(".bias")) == "colwise" or plan.named(name) == "colwise":
            shard = even_shard(shape[0], plan.group, name)
            if shard is not None:
                shape[0], shards = shard.size, (shard,)
        kind = "float32" if wide is not None and wide.search(name) else dtype_name(parameter.dtype)
        tensors[name] = OwnTensor(tuple(places), WeightSlot(tuple(shape), kind, 0 if shards else None, shards=shards))
    for name, buffer in model.named_buffers():
        if name in stored:
            owner, _, last = name.rpartition(".")
            kind = "float32" if wide is not None and wide.search(name) else dtype_name(buffer.dtype)
            place = (model.get_submodule(owner), last)
            tensors[name] = OwnTensor((place,), WeightSlot(tuple(buffer.shape), kind), is_buffer=True)
    return tensors


def _in_float32(model: nn.Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Which tensors Transformers keeps in float32 where the model's dtype is narrower, as from_pretrained does."""
    always = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    narrow = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    names = always | narrow
    if not names:
        return None
    patterns = (re.escape(name).replace(r"\*", ".*") for name in sorted(names))
    return re.compile("|".join(rf"(^|\.){pattern}(\.|$)" for pattern in patterns))
