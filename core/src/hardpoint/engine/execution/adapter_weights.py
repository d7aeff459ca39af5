"""The LoRA adapters that one rank holds: a second source of weights for the model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hardpoint.checkpoint.peft import LoRAFiles
from hardpoint.checkpoint.reading import Grouped
from hardpoint.checkpoint.source import resolve_adapter
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.engine.lora import Adapter
from hardpoint.layers import CausalLM
from hardpoint.layers.base import walk
from hardpoint.layers.loading import copy_shard
from hardpoint.layers.lora import MATRICES, LinearAdapters, Matrix
from hardpoint_plugin_api import CheckpointError

_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class _Place:
    """A destination of matrices: a part of a layer."""

    layer: LinearAdapters
    part: str | None


@dataclass(frozen=True)
class _Module:
    """The destinations of a module's matrices, by address. Each gets A, and B or, where ``grouped``, its rows of B."""

    places: Mapping[str, _Place]
    grouped: Grouped | None = None

    def shapes(self, rank: int) -> dict[Matrix, tuple[int, ...]]:
        """The shapes of A and B as an adapter of rank ``rank`` has them."""
        slots = [place.layer.declare(place.part, rank) for place in self.places.values()]
        rows = sum(each["B"].stored_shape(None)[0] for each in slots)
        return {"A": slots[0]["A"].stored_shape(None), "B": (rows, rank)}

    def fill(self, slot: int, rank: int, matrices: Mapping[Matrix, torch.Tensor]) -> None:
        """Copy what this rank holds of A and B to ``slot`` of every destination."""
        b = matrices["B"]
        rows_of = self.grouped.split(b) if self.grouped is not None else dict.fromkeys(self.places, b)
        for address, place in self.places.items():
            given = {"A": matrices["A"], "B": rows_of[address]}
            for matrix, own in place.layer.declare(place.part, rank).items():
                copy_shard(given[matrix], place.layer.place(slot, place.part, matrix, rank), own)


class AdapterWeights:
    """Holds the memory of every linear layer's slots, and what lies in them. ``max_rank`` bounds an adapter's rank."""

    def __init__(self, model: CausalLM, ctx: Context) -> None:
        self._names, self._max_rank, self._dtype = model.module_names, ctx.config.max_lora_rank, ctx.dtype
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
        files, modules = self._opened(_folder_of(adapter))
        self._clear(adapter.slot)
        with torch.inference_mode():
            for module, target in modules.items():
                read = {matrix: self._read(adapter, files, module, matrix) for matrix in MATRICES}
                target.fill(adapter.slot, files.rank(module), read)

    def _read(self, adapter: Adapter, files: LoRAFiles, module: str, matrix: Matrix) -> torch.Tensor:
        """A matrix of a module in the slots' dtype; B with the scale. Raises CheckpointError."""
        name, scale = files.modules[module][matrix], files.scale(module)
        stored = files.tensors.read(name).float()
        tensor: torch.Tensor = (stored * scale if matrix == "B" else stored).to(self._dtype)
        if not tensor.isfinite().all():
            scaled, dtype = f", times the scale {scale:g}," if matrix == "B" else "", dtype_name(self._dtype)
            raise CheckpointError(
                f"{adapter.path}: tensor {name!r}{scaled} holds numbers that are not finite in {dtype}"
            )
        return tensor

    def _opened(self, folder: Path) -> tuple[LoRAFiles, dict[str, _Module]]:
        """The adapter's files, and the destinations of the modules that are on this rank. Raises CheckpointError."""
        files, modules = LoRAFiles.open(folder), {}
        for module, names in files.modules.items():
            rank = files.rank(module)
            if rank > self._max_rank:
                raise CheckpointError(
                    f"{folder}: the adapter has rank {rank} (module {module!r}), and slots hold {self._max_rank}; "
                    f"start with --max-lora-rank {rank}"
                )
            target = self._module(folder, module, names["A"])
            if target is None:
                continue
            modules[module] = target
            for matrix, shape in target.shapes(rank).items():
                _check_header(files, names[matrix], shape)
        return files, modules

    def _module(self, folder: Path, module: str, tensor: str) -> _Module | None:
        """The destinations of a module's matrices; None for one of another pipeline stage. Raises CheckpointError."""
        address = self._names.get(module, "")
        if address is None:
            return None
        if isinstance(address, Grouped):
            return _Module({each: self._place(folder, each, tensor) for each, _ in address.parts}, address)
        return _Module({address: self._place(folder, address, tensor)})

    def _place(self, folder: Path, address: str, tensor: str) -> _Place:
        """The part of a layer at ``address``; empty for a module that the model has not. Raises CheckpointError."""
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


def _check_header(files: LoRAFiles, name: str, wanted: tuple[int, ...]) -> None:
    info = files.tensors.info(name)
    if info.shape != wanted:
        raise CheckpointError(
            f"{files.tensors.title}: tensor {name!r} has shape {list(info.shape)}, expected {list(wanted)} by the "
            "model's layer and the adapter's rank"
        )
    if info.dtype not in _FLOATS:
        raise CheckpointError(f"{files.tensors.title}: tensor {name!r} is {info.dtype}; expected {', '.join(_FLOATS)}")
