"""From a checkpoint's tensors to a model's slots: every slot filled once, nothing left over, no second copy.

Tensors are streamed file by file into slots allocated on the device as their first part arrives; a layer is prepared
(packed) as soon as its own and its sub-layers' slots are full, so that packing never doubles memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from hardpoint.checkpoint.reading import Grouped, Reading, WeightNames
from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.layers.base import PluggableLayer, walk
from hardpoint.layers.expert_matrices import ExpertMatrices, Gathered, is_gathered
from hardpoint.layers.load_progress import LoadProgress
from hardpoint.layers.tied_head import TiedHead
from hardpoint_plugin_api import CheckpointError, TensorInfo, WeightSlot

_IGNORED = re.compile(r".*(rotary_emb\.inv_freq|attention\.(masked_)?bias)$")
"""Buffers that old checkpoints hold and every implementation computes itself."""

_PLAIN = ("float32", "float16", "bfloat16", "float64")
"""Dtypes of weights that are numbers in themselves; others mean something only to a quantization method."""


class TensorSource(Protocol):
    """Where tensors come from. ``title`` is for messages; ``names`` are all of them, None where that is not known."""

    @property
    def title(self) -> str: ...
    @property
    def names(self) -> frozenset[str] | None: ...
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class GivenTensors:
    """Tensors that somebody hands over, by the names of a checkpoint."""

    tensors: Iterable[tuple[str, torch.Tensor]]
    title: str = "the given tensors"
    names: None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them. Raises CheckpointError for anything but pairs of a name and a tensor."""
        for item in self.tensors:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)):
                raise CheckpointError(f"{self.title}: expected pairs of a name and a tensor, got {item!r:.80}")
            yield item


def load_weights(model: nn.Module, names: WeightNames, source: TensorSource, device: torch.device) -> None:
    """Fill the slots of ``model``, prepare its layers bottom-up, and bind them.

    ``names`` says where each expected tensor of the checkpoint goes; where several fill the same, one suffices. Raises
    CheckpointError, naming the tensors, for missing or extra ones, for wrong shapes (both shown), and for dtypes that a
    copy would change the meaning of; where ``source`` are files, before any weights are read. Also raises it for a
    stored head unlike the embedding that it is tied to.
    """
    plan = _Plan.of(model, names)
    plan.check_names(source)
    if isinstance(source, TensorFiles):
        plan.check_headers(source)
    filling, tied = _Filling(plan, device, source.title), TiedHead(names, source.title, source.names)
    progress = LoadProgress(source.title, None if source.names is None else len(source.names))
    for name, tensor in plan.stream(source, tied.compared):
        progress.note(tensor.nbytes)
        if (place := plan.place(name, source)) is not None:
            filling.take(name, tensor, place)
        tied.see(name, tensor)
    filling.finish()


def load_made_weights(
    model: nn.Module,
    names: WeightNames,
    make: Callable[[str, tuple[int, ...]], torch.Tensor],
    device: torch.device,
    title: str,
) -> None:
    """The same without a checkpoint: ``make(name, shape)`` returns a tensor of plain numbers, as one would hold it.

    Of several that would fill the same slots the one that fills the most is made, and on a rank of several only what it
    holds a part of. Raises CheckpointError for slots that plain numbers cannot fill.
    """
    plan = _Plan.of(model, names)
    filling = _Filling(plan, device, title)
    for name, place in plan.sufficient().items():
        filling.take(name, make(name, plan.stored_shape(place)), place)
    filling.finish()


def check_weights(model: nn.Module, names: WeightNames, files: TensorFiles) -> None:
    """Raise what ``load_weights`` would, without reading a tensor's bytes or touching the model."""
    plan = _Plan.of(model, names)
    plan.check_names(files)
    plan.check_headers(files)


_NEEDS_METHOD = "quantized weights need a quantization method ('quantization_config' in config.json, --quantization)"
_OF_QUANTIZED = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight", ".SCB", ".absmax")
"""Ends of the names of tensors that methods read beside weights, or in place of them."""
_PLUS_ONE = "plus_one"
_ORDERS = frozenset({"interleaved", "transposed"})
"""How a tensor may hold a whole stack, or a matrix, in another order than the slot: see WeightNames."""


@dataclass(frozen=True)
class _Target:
    layer: str
    slot: str
    part: str | None
    orders: frozenset[str] = frozenset()
    plus_one: bool = False


@dataclass(frozen=True)
class _Place:
    """The destination of a tensor: targets by address. It is copied to one; or ``readings`` make tensors for several,
    one for each part of the tensor; or it is split as ``grouped`` says."""

    targets: Mapping[str, _Target]
    readings: tuple[Reading, ...] = ()
    grouped: Grouped | None = None

    @classmethod
    def of(cls, place: str | Grouped | tuple[Reading, ...], find: Callable[[str], _Target]) -> _Place:
        """The destination that ``place`` means, with targets that ``find`` finds."""
        if isinstance(place, tuple):
            return cls({address: find(address) for one in place for address in one.places.values()}, place)
        if isinstance(place, Grouped):
            return cls({address: find(address) for address, _ in place.parts}, grouped=place)
        return cls({place: find(place)})

    @property
    def reading(self) -> Reading | None:
        """The first part's, which reads the tensor for all; None for one that is copied."""
        return self.readings[0] if self.readings else None


def _find(address: str, layers: dict[str, PluggableLayer], slots: dict[tuple[str, str], WeightSlot]) -> _Target:
    """The slot that ``address`` means: of the innermost layer that exists, or, where a replacement has no such
    sub-layer, the dotted slot of a layer further out."""
    plain, _, part = address.removesuffix("]").partition("[")
    elements = plain.split(".")
    for cut in range(len(elements) - 1, -1, -1):
        layer, slot = ".".join(elements[:cut]), ".".join(elements[cut:])
        if (layer, slot) in slots:
            orders = frozenset(part.split(","))
            if orders <= _ORDERS and slots[layer, slot].stack:
                return _Target(layer, slot, None, orders)
            if part == "transposed" and not slots[layer, slot].parts:
                return _Target(layer, slot, None, orders)
            if part == _PLUS_ONE and not slots[layer, slot].parts:
                return _Target(layer, slot, None, plus_one=True)
            return _Target(layer, slot, part or None)
    raise CheckpointError(
        f"no layer has a slot for {address!r}; the replacement of a layer above it must declare one under a dotted name"
    )


@dataclass(frozen=True)
class _Plan:
    """Which tensor goes where. ``unneeded`` ones may be there."""

    layers: dict[str, PluggableLayer]
    slots: dict[tuple[str, str], WeightSlot]
    places: dict[str, _Place]
    unneeded: set[str]

    @classmethod
    def of(cls, model: nn.Module, names: WeightNames) -> _Plan:
        layers = dict(walk(model))
        slots = {(path, name): slot for path, layer in layers.items() for name, slot in layer.declare().items()}
        places = {}
        for tensor, place in names.items():
            if place is None:
                continue
            found = _Place.of(place, lambda address: _find(address, layers, slots))
            if not any(slots[t.layer, t.slot].is_elsewhere(t.part) for t in found.targets.values()):
                places[tensor] = found
        return cls(layers, slots, places, set(names) - set(places))

    def check_names(self, source: TensorSource) -> None:
        """Raise CheckpointError for missing and extra tensors, as far as their names are known."""
        if source.names is None:
            return
        missing = self._missing(source.names)
        extra = sorted(name for name in source.names if self._is_extra(name))
        problems = []
        if missing:
            problems.append(f"missing tensors: {_listed(missing)}")
        if extra:
            problems.append(f"tensors that the model has no place for: {_listed(extra)}")
        if any(name.endswith(_OF_QUANTIZED) for name in extra):
            problems.append(_NEEDS_METHOD)
        if problems:
            raise CheckpointError(f"{source.title}: " + "; ".join(problems))

    def _missing(self, present: frozenset[str]) -> list[str]:
        """The absent tensors that no others stand in for: a stack may come whole, or as a tensor for each number."""

        full = {piece for name, place in self.places.items() if name in present for piece in self._filled(place)}
        missing = []
        for name, place in self.places.items():
            pieces = self._filled(place)
            if name not in present and (not pieces or pieces - full):
                missing.append(name)
                full |= pieces
        return sorted(missing)

    def _filled(self, place: _Place) -> set[tuple[str, str, str | None]]:
        """The pieces of slots that it fills: layer, slot, piece."""
        return {
            (target.layer, target.slot, piece)
            for target in place.targets.values()
            for piece in self.slots[target.layer, target.slot].pieces(target.part)
        }

    def sufficient(self) -> dict[str, _Place]:
        """Tensors of plain numbers that fill every slot, none twice; of several that may, those that fill the most.

        In the order of ``places``, which keeps a layer's tensors together: it is packed when all are there.
        """
        plain = {
            name: self._filled(place)
            for name, place in self.places.items()
            if all(place.readings or self.slots[t.layer, t.slot].dtype in _PLAIN for t in place.targets.values())
        }
        full: set[tuple[str, str, str | None]] = set()
        chosen = set()
        for name, pieces in sorted(plain.items(), key=lambda item: -len(item[1])):
            if not pieces & full:
                chosen.add(name)
                full |= pieces
        return {name: place for name, place in self.places.items() if name in chosen}

    def stream(self, source: TensorSource, compared: AbstractSet[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of ``source``. Of files, this rank's rows and ``compared`` tensors alone can be looked at."""
        if not isinstance(source, TensorFiles):
            return iter(source)
        here = source.names
        rows = {name: self._rows(place, source.info(name)) for name, place in self.places.items() if name in here}
        rows |= {name: _all_rows(source.info(name)) for name in compared & here}
        return source.of_rows(rows)

    def _rows(self, place: _Place, tensor: TensorInfo) -> range:
        """The rows of a stored tensor, along its first axis, that this rank copies something of."""
        if place.readings or place.grouped or len(place.targets) != 1 or not tensor.shape:
            return _all_rows(tensor)
        (target,) = place.targets.values()
        slot = self.slots[target.layer, target.slot]
        if target.orders:
            return _all_rows(tensor)
        if slot.stack and target.part is None:
            return range(min(slot.stack), max(slot.stack) + 1)
        shard = slot.shard(target.part)
        if shard is None or shard[0] != len(slot.shape) - len(tensor.shape):
            return _all_rows(tensor)
        pieces = shard[1].own
        return range(
            min((piece.source for piece in pieces), default=0),
            max((piece.source + piece.count for piece in pieces), default=0),
        )

    def place(self, name: str, source: TensorSource) -> _Place | None:
        """Where tensor ``name`` goes, None where nobody needs it. Raises CheckpointError for one without a place."""
        if self._is_extra(name):
            raise CheckpointError(f"{source.title}: tensors that the model has no place for: {name}")
        return self.places.get(name)

    def check_headers(self, files: TensorFiles) -> None:
        """Raise CheckpointError for the first tensor whose header is wrong."""
        for name, place in self.places.items():
            if name in files.names:
                self.check(name, files.info(name), place, files.title)

    def stored_shape(self, place: _Place) -> tuple[int, ...]:
        """The shape in a checkpoint of the tensor that goes there."""
        if place.reading is not None:
            return place.reading.shape
        target, *others = place.targets.values()
        shape = self.slots[target.layer, target.slot].stored_shape(target.part)
        if place.grouped is not None:
            rows = sum(self.slots[t.layer, t.slot].stored_shape(t.part)[0] for t in others)
            return (shape[0] + rows, *shape[1:])
        return (*shape[:-2], shape[-1], shape[-2]) if "transposed" in target.orders else shape

    def check(self, name: str, tensor: TensorInfo, place: _Place, title: str) -> None:
        """Raise CheckpointError for a wrong shape, or a dtype that a copy would change the meaning of."""
        reading, wanted = place.reading, self.stored_shape(place)
        if reading is not None:
            dtypes: tuple[str, ...] = reading.stored.dtypes
        else:
            target = next(iter(place.targets.values()))
            slot = self.slots[target.layer, target.slot]
            dtypes = (slot.dtype, *(_PLAIN if slot.dtype in _PLAIN else ()))
        if tensor.shape != wanted:
            raise CheckpointError(
                f"{title}: tensor {name!r} has shape {list(tensor.shape)}, the model expects {list(wanted)}"
            )
        if tensor.dtype in dtypes:
            return
        if reading is not None:
            raise CheckpointError(f"{title}: tensor {name!r} is {tensor.dtype}, expected {' or '.join(dtypes)}")
        raise CheckpointError(
            f"{title}: tensor {name!r} is {tensor.dtype}, the model expects {dtypes[0]}; {_NEEDS_METHOD}"
        )

    def _is_extra(self, name: str) -> bool:
        return not (name in self.places or self._is_unneeded(name) or _IGNORED.match(name))

    def _is_unneeded(self, name: str) -> bool:
        """Whether it is named as such, or a module that it is in, as ``MODULE.*``."""
        elements = name.split(".")
        modules = (".".join(elements[:cut]) + ".*" for cut in range(1, len(elements)))
        return not self.unneeded.isdisjoint((name, *modules))


def _all_rows(tensor: TensorInfo) -> range:
    return range(tensor.shape[0] if tensor.shape else 1)


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _in_order(
    tensor: torch.Tensor, number: str, slot: WeightSlot, orders: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensor of one number of a stack, by part, in the order of the slot."""
    matrix = tensor.t() if "transposed" in orders else tensor
    if "interleaved" not in orders:
        yield number, matrix
        return
    for place, (block, _) in enumerate(slot.parts):
        yield f"{number}.{block}", matrix[place :: len(slot.parts)] if matrix.shape[0] > 1 else matrix


def copy_shard(tensor: torch.Tensor, filled: torch.Tensor, slot: WeightSlot, part: str | None = None) -> None:
    """Copy what this rank holds of a stored ``tensor`` to ``filled``: the place of ``part`` of ``slot``."""
    shard = slot.shard(part)
    if shard is None:
        filled.copy_(tensor)
        return
    axis = shard[0] - (len(slot.shape) - tensor.ndim)
    for piece in shard[1].own:
        source = tensor.narrow(axis, piece.source, piece.count)
        filled.narrow(axis, piece.target, piece.count).copy_(source)


class _Filling:
    """Slots on their way to being full. ``_open`` counts the parts still to come of each layer and all inside it."""

    def __init__(self, plan: _Plan, device: torch.device, title: str) -> None:
        self._plan, self._layers, self._slots = plan, plan.layers, plan.slots
        self._device, self._title = device, title
        self._gathered, self._gathered_of = ExpertMatrices(), ""
        self._left = {(layer, name, part) for (layer, name), slot in self._slots.items() for part in slot.pieces()}
        self._open = dict.fromkeys(self._layers, 0)
        for layer, _, _ in self._left:
            for path in self._around(layer):
                self._open[path] += 1
        for path, count in self._open.items():
            if count == 0:
                self._layers[path].prepare()

    def take(self, name: str, tensor: torch.Tensor, place: _Place) -> None:
        """Copy one checkpoint tensor, or what its reading makes of it, into slots.

        Slots are allocated before anything is read into them: of what lives on, nothing then lies behind what goes, and
        an allocator that returns memory from one end alone (glibc's) loses none.
        """
        self._plan.check(name, TensorInfo(tuple(tensor.shape), dtype_name(tensor.dtype)), place, self._title)
        if place.reading is None:
            pieces = dict.fromkeys(place.targets, tensor) if place.grouped is None else place.grouped.split(tensor)
            for address, piece in pieces.items():
                self._copy(name, piece, place.targets[address])
            return
        for target in place.targets.values():
            self._allocated(target)
        piece = place.reading.cut(tensor, self._device)
        if len(place.readings) == 1 and is_gathered(place.reading, piece):
            self._gather(name, piece, place)
            return
        with self._naming(name):
            made = place.reading.stored.read(piece)
        for reading in place.readings:
            self._fill(name, reading, made)

    def _gather(self, name: str, piece: torch.Tensor, place: _Place) -> None:
        """Keep a matrix of an expert until it is read with others of its layer."""
        assert place.reading is not None
        target = next(iter(place.targets.values()))
        if target.layer != self._gathered_of:
            self._read_gathered()
        self._gathered_of = target.layer
        full = self._gathered.take(name, piece, place.reading, (target.slot, (target.part or "").partition(".")[2]))
        if full is not None:
            self._fill_all(full)

    def _read_gathered(self) -> None:
        for gathered in self._gathered.rest():
            self._fill_all(gathered)

    def _fill_all(self, gathered: Gathered) -> None:
        with self._naming(f"{gathered.names[0]} to {gathered.names[-1]}"):
            made = list(gathered.read())
        for name, reading, slots in made:
            self._fill(name, reading, slots)

    def _fill(self, name: str, reading: Reading, made: Mapping[str, torch.Tensor]) -> None:
        own, targets = reading.own(made), self._plan.places[name].targets
        for slot, address in reading.places.items():
            self._copy(name, own[slot], targets[address], is_cut=True)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the tensor in a CheckpointError of its reading."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self._title}: tensor {name!r}: {error}") from None

    def _copy(self, name: str, tensor: torch.Tensor, target: _Target, *, is_cut: bool = False) -> None:
        """Fill a slot's part (converting floating dtypes), and prepare the layers that this completes.

        Of a tensor that is not ``is_cut``, only what this rank holds is touched: the rest of its file is never read.
        """
        slot = self._slots[target.layer, target.slot]
        if slot.stack and target.part is None:
            for index, number in enumerate(slot.stack):
                matrix = tensor[index if is_cut else number]
                for place, one in _in_order(matrix, str(number), slot, target.orders):
                    self._copy(name, one, replace(target, part=place, orders=frozenset()), is_cut=is_cut)
            return
        pieces = slot.pieces(target.part)
        if any((target.layer, target.slot, piece) not in self._left for piece in pieces):
            raise CheckpointError(f"{self._title}: tensor {name!r} is there twice")
        filled = self._allocated(target)[slot.part_index(target.part)]
        tensor = tensor.t() if "transposed" in target.orders else tensor
        tensor = tensor.float() + 1 if target.plus_one else tensor
        if is_cut:
            filled.copy_(tensor)
        else:
            copy_shard(tensor, filled, slot, target.part)
        for part in pieces:
            self._left.remove((target.layer, target.slot, part))
            for path in self._around(target.layer):
                self._open[path] -= 1
                if self._open[path] == 0:
                    self._layers[path].prepare()

    def _allocated(self, target: _Target) -> torch.Tensor:
        """The whole of a slot, allocated when its first part comes."""
        weights, slot = self._layers[target.layer].weights, self._slots[target.layer, target.slot]
        if target.slot not in weights:
            make = torch.zeros if any(plan.has_padding for plan in slot.shards) else torch.empty
            weights[target.slot] = make(slot.shape, dtype=dtype_of(slot.dtype), device=self._device)
        return weights[target.slot]

    def finish(self) -> None:
        """Bind the layers. Raises CheckpointError if any part of a slot was not filled."""
        self._read_gathered()
        if self._left:
            short = sorted(f"{layer}.{slot}" + (f"[{part}]" if part else "") for layer, slot, part in self._left)
            raise CheckpointError(f"{self._title}: the checkpoint leaves slots of the model unfilled: {_listed(short)}")
        for layer in self._layers.values():
            layer.bind()

    def _around(self, path: str) -> Iterator[str]:
        """The layer at ``path`` and those that hold it, innermost first."""
        elements = path.split(".")
        for cut in range(len(elements), -1, -1):
            outer = ".".join(elements[:cut])
            if outer in self._layers:
                yield outer
