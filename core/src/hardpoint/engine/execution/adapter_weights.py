"""The LoRA adapters that one rank holds: a second source of weights for the model's linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hardpoint.checkpoint.peft import LoRAFiles
from hardpoint.checkpoint.source import resolve_adapter
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.engine.lora import Adapter
from hardpoint.layers import CausalLM
from hardpoint.layers.base import walk
from hardpoint.layers.loading import copy_shard
from hardpoint.layers.lora import LinearAdapters
from hardpoint_plugin_api import CheckpointError, WeightSlot

_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class _Place:
    """Where the matrices of a module go: a part of a layer."""

    layer: LinearAdapters
    part: str | None


class AdapterWeights:
    """Holds the memory of every linear layer's slots, and what lies in them. ``max_rank`` bounds an adapter's rank."""

    def __init__(self, model: CausalLM, ctx: Context) -> None:
        self._names, self._max_rank = model.module_names, ctx.config.max_lora_rank
        self._layers = {path: layer.adapters for path, layer in walk(model) if layer.adapters is not None}
        self._loaded: dict[int, Adapter] = {}

    def allocate(self) -> None:
        """Take memory for the slots of all layers."""
        for layer in self._layers.values():
            layer.allocate()

    def check(self, adapter: Adapter) -> None:
        """Raise CheckpointError for an adapter that could not be loaded; reads headers alone."""
        self._opened(_folder_of(adapter))

    def load(self, adapter: Adapter) -> None:
        """Fill the slot of ``adapter`` from its folder, with the scale multiplied into B.

        Raises CheckpointError where ``check`` would, or for numbers that are not finite in the slot's dtype. The slot
        is empty then.
        """
        try:
            self._fill(adapter)
        except BaseException:
            self.unload(adapter.slot)
            raise
        self._loaded[adapter.slot] = adapter

    def unload(self, slot: int) -> None:
        """Empty a slot."""
        self._loaded.pop(slot, None)
        self._clear(slot)

    def _clear(self, slot: int) -> None:
        for layer in self._layers.values():
            layer.clear(slot)

    def drop(self) -> None:
        """Give the memory of all slots back; ``restore`` reads the adapters again."""
        for layer in self._layers.values():
            layer.drop()

    def restore(self) -> None:
        """Take the memory again and read every adapter from its folder. Raises CheckpointError."""
        self.allocate()
        for adapter in self._loaded.values():
            try:
                self._fill(adapter)
            except CheckpointError as error:
                raise CheckpointError(
                    f"adapter {adapter.name!r} cannot be read again: {error}; bring its files back, or unload it "
                    f"(UnloadAdapter, /v1/unload_lora_adapter), then wake up again"
                ) from error

    def _fill(self, adapter: Adapter) -> None:
        """Only finite numbers reach a slot: one that is not would turn the rows of all other adapters into NaN."""
        files, places = self._opened(_folder_of(adapter))
        self._clear(adapter.slot)
        with torch.inference_mode():
            for module, place in places.items():
                rank, scale = files.rank(module), files.scale(module)
                for matrix, slot in place.layer.declare(place.part, rank).items():
                    name = files.modules[module][matrix]
                    stored = files.tensors.read(name).float()
                    tensor = (stored * scale if matrix == "B" else stored).to(dtype_of(slot.dtype))
                    if not tensor.isfinite().all():
                        scaled = f", times the scale {scale:g}," if matrix == "B" else ""
                        raise CheckpointError(
                            f"{adapter.path}: tensor {name!r}{scaled} holds numbers that are not finite in {slot.dtype}"
                        )
                    copy_shard(tensor, place.layer.place(adapter.slot, place.part, matrix, rank), slot)

    def _opened(self, folder: Path) -> tuple[LoRAFiles, dict[str, _Place]]:
        """The adapter's files, and where the modules go that are on this rank. Raises CheckpointError."""
        files, places = LoRAFiles.open(folder), {}
        for module, names in files.modules.items():
            rank = files.rank(module)
            if rank > self._max_rank:
                raise CheckpointError(
                    f"{folder}: the adapter has rank {rank} (module {module!r}), and slots hold {self._max_rank}; "
                    f"start with --max-lora-rank {rank}"
                )
            place = self._place(folder, module, names["A"])
            if place is None:
                continue
            places[module] = place
            for matrix, slot in place.layer.declare(place.part, rank).items():
                _check_header(files, names[matrix], slot)
        return files, places

    def _place(self, folder: Path, module: str, tensor: str) -> _Place | None:
        """Where a module's matrices go; None for one of another pipeline stage. Raises CheckpointError."""
        address = self._names.get(module, "")
        if address is None:
            return None
        path, _, part = address.removesuffix("]").partition("[")
        path = path.removesuffix(".weight")
        for layer, name in ((path, part or None), (f"{path}.{part}", part)):  # parts may be layers of their own
            found = self._layers.get(layer)
            if found is not None and found.has(name):
                return _Place(found, name)
        reason = f"the layer at {path} takes no adapters" if address else "the model has no such module"
        raise CheckpointError(
            f"{folder}: no linear layer takes tensor {tensor!r}: {reason}; adapters are served on the linear layers of "
            "attention and feed-forwards, not on embeddings, output heads, routers and experts"
        )


def _folder_of(adapter: Adapter) -> Path:
    """Where the adapter lies for this rank, which looks it up where the front end's folder is not there: a rank of
    another machine."""
    folder = Path(adapter.folder)
    return folder if adapter.folder and folder.is_dir() else resolve_adapter(adapter.path)


def _check_header(files: LoRAFiles, name: str, slot: WeightSlot) -> None:
    info, wanted = files.tensors.info(name), slot.stored_shape(None)
    if info.shape != wanted:
        raise CheckpointError(
            f"{files.tensors.title}: tensor {name!r} has shape {list(info.shape)}, expected {list(wanted)} by the "
            "model's layer and the adapter's rank"
        )
    if info.dtype not in _FLOATS:
        raise CheckpointError(f"{files.tensors.title}: tensor {name!r} is {info.dtype}; expected {', '.join(_FLOATS)}")
