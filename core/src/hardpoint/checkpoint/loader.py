"""From a checkpoint's tensors to a model's slots: every slot filled once, nothing left over, no second copy.

Tensors are streamed file by file into slots allocated on the device as their first part arrives; a layer is prepared
(packed) as soon as its own and its sub-layers' slots are full, so that packing never doubles memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.layers.base import PluggableLayer, walk
from hardpoint_plugin_api import CheckpointError, WeightSlot

_IGNORED = re.compile(r".*(rotary_emb\.inv_freq|attention\.(masked_)?bias)$")
"""Buffers that old checkpoints hold and every implementation computes itself."""

_PLAIN = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
"""Dtypes of weights that are numbers in themselves; others mean something only to a quantization method."""


def load_weights(model: nn.Module, names: dict[str, str | None], files: SafetensorsFiles, device: torch.device) -> None:
    """Fill the slots of ``model``, prepare its layers bottom-up, and bind them.

    ``names`` maps each expected checkpoint tensor to ``"layer.path.slot"`` or ``"layer.path.slot[part]"``, and each
    that may be there but is not needed to None.
    Raises CheckpointError, naming the tensors, for missing or extra ones, for wrong shapes (both shown), and for
    dtypes that a copy would change the meaning of.
    """
    layers = dict(walk(model))
    slots = {(path, name): slot for path, layer in layers.items() for name, slot in layer.declare().items()}
    targets = {tensor: _find(address, layers, slots) for tensor, address in names.items() if address}
    _check_names(files, set(targets), set(names) - set(targets))
    filling = _Filling(layers, slots, device, files.folder)
    for name, tensor in files:
        if name in targets:
            filling.copy(name, tensor, targets[name])
    filling.check_full()
    for layer in layers.values():
        layer.bind()


@dataclass(frozen=True)
class _Target:
    layer: str
    slot: str
    part: str | None


def _find(address: str, layers: dict[str, PluggableLayer], slots: dict[tuple[str, str], WeightSlot]) -> _Target:
    """The slot that ``address`` means: of the innermost layer that exists, or, where a replacement has no such
    sub-layer, the dotted slot of a layer further out."""
    plain, _, part = address.removesuffix("]").partition("[")
    elements = plain.split(".")
    for cut in range(len(elements) - 1, -1, -1):
        layer, slot = ".".join(elements[:cut]), ".".join(elements[cut:])
        if (layer, slot) in slots:
            return _Target(layer, slot, part or None)
    raise CheckpointError(
        f"no layer has a slot for {address!r}; the replacement of a layer above it must declare one under a dotted name"
    )


def _check_names(files: SafetensorsFiles, wanted: set[str], unneeded: set[str]) -> None:
    missing = sorted(wanted - files.names)
    extra = sorted(name for name in files.names - wanted - unneeded if not _IGNORED.match(name))
    problems = []
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}")
    if extra:
        problems.append(f"tensors that the model has no place for: {_listed(extra)}")
    if problems:
        raise CheckpointError(f"{files.folder}: " + "; ".join(problems))


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


class _Filling:
    """Slots on their way to being full. ``_open`` counts the parts still to come of each layer and all inside it."""

    def __init__(
        self,
        layers: dict[str, PluggableLayer],
        slots: dict[tuple[str, str], WeightSlot],
        device: torch.device,
        folder: Path,
    ) -> None:
        self._layers, self._slots, self._device, self._folder = layers, slots, device, folder
        self._left = {(layer, name, part) for (layer, name), slot in slots.items() for part in _parts(slot)}
        self._open = dict.fromkeys(layers, 0)
        for layer, _, _ in self._left:
            for path in self._around(layer):
                self._open[path] += 1
        for path, count in self._open.items():
            if count == 0:
                layers[path].prepare()

    def copy(self, name: str, tensor: torch.Tensor, target: _Target) -> None:
        """Copy one checkpoint tensor into its part of a slot (converting floating dtypes); prepare what that fills."""
        slot = self._slots[target.layer, target.slot]
        start, rows = slot.part_rows(target.part)
        wanted = (rows, *slot.shape[1:])
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} has shape {list(tensor.shape)}, the model expects {list(wanted)}"
            )
        dtype = dtype_of(slot.dtype)
        if tensor.dtype != dtype and not {tensor.dtype, dtype} <= _PLAIN:
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} is {dtype_name(tensor.dtype)}, the model expects {slot.dtype}; "
                "quantized weights need a quantization method ('quantization_config' in config.json, --quantization)"
            )
        weights = self._layers[target.layer].weights
        if target.slot not in weights:
            weights[target.slot] = torch.empty(slot.shape, dtype=dtype, device=self._device)
        weights[target.slot][start : start + rows].copy_(tensor)
        for part in (target.part,) if target.part else _parts(slot):
            self._left.remove((target.layer, target.slot, part))
            for path in self._around(target.layer):
                self._open[path] -= 1
                if self._open[path] == 0:
                    self._layers[path].prepare()

    def check_full(self) -> None:
        """Raise CheckpointError if any part of a slot was not filled."""
        if self._left:
            short = sorted(f"{layer}.{slot}" + (f"[{part}]" if part else "") for layer, slot, part in self._left)
            raise CheckpointError(
                f"{self._folder}: the checkpoint leaves slots of the model unfilled: {_listed(short)}"
            )

    def _around(self, path: str) -> Iterator[str]:
        """The layer at ``path`` and those that hold it, innermost first."""
        elements = path.split(".")
        for cut in range(len(elements), -1, -1):
            outer = ".".join(elements[:cut])
            if outer in self._layers:
                yield outer


def _parts(slot: WeightSlot) -> tuple[str | None, ...]:
    return tuple(name for name, _ in slot.parts) or (None,)


def expand_names(patterns: dict[str, str | None], num_layers: int) -> dict[str, str | None]:
    """Expand ``{i}`` in both halves of each pattern to the layer numbers."""

    def numbers(pattern: str) -> Iterable[int]:
        return range(num_layers) if "{i}" in pattern else (0,)

    return {
        tensor.replace("{i}", str(i)): address and address.replace("{i}", str(i))
        for tensor, address in patterns.items()
        for i in numbers(tensor)
    }
