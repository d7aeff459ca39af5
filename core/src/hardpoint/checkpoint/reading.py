"""How a model says where a checkpoint's tensors go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hardpoint_plugin_api import Module, ShardPlan, StoredTensor

ONCE = frozenset({"weight_group_index", "input_scale", "input_scale_2", "input_zero_point"})
"""Slots of a matrix's columns or inputs: they have no rows, and each part of the matrix has the same."""


@dataclass(frozen=True)
class Turn:
    """The rows of one part of a matrix whose parts take turns: in each of ``groups``, as many rows of each as ``sizes``
    says. The part is number ``place`` of them.

    Its own rows are those of the first group, then of the second, and so on. Qwen3-Next's projections have a group for
    each key head.
    """

    groups: int
    sizes: tuple[int, ...]
    place: int

    @property
    def total(self) -> int:
        """The rows of all parts."""
        return self.groups * sum(self.sizes)

    def cuts(self, block: int) -> bool:
        """Whether a block of so many rows reaches from one part into another."""
        return any(rows % block for rows in self.sizes)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The part's rows of ``x``, which has a row for every block of the matrix's; no block reaches beyond a part."""
        per = self.total // x.shape[0]
        apart: torch.Tensor = x.unflatten(0, (self.groups, -1))
        return apart.narrow(1, sum(self.sizes[: self.place]) // per, self.sizes[self.place] // per).flatten(0, 1)


@dataclass(frozen=True)
class Reading:
    """A tensor that is read by a quantization scheme, for one module. ``places``: the address of each slot it fills.

    ``rows``, ``columns`` and ``experts`` say how ranks divide the module's matrix, or its stack: what is read is this
    rank's piece. ``rows`` are those of one part of a stack. With a ``turn``, the module has several parts, each with a
    reading of its own, and ``rows`` are the part's: the tensor is read whole, since a rank's rows lie apart in it.
    """

    stored: StoredTensor
    module: Module
    places: Mapping[str, str]
    rows: ShardPlan | None = None
    columns: ShardPlan | None = None
    experts: ShardPlan | None = None
    turn: Turn | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        module = self.module
        return self.stored.shape(module.out_features, module.in_features, module.stack.count if module.stack else 1)

    def own(self, made: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The rows of this part, and rank, of the slots that were ``made`` of the piece that ``cut`` returns."""
        turn = self.turn
        if turn is None:
            return made
        return {
            slot: x if slot in ONCE or x.numel() == 1 or x.shape[0] == 1 else self._of_rank(turn.of(x))
            for slot, x in made.items()
        }

    def _of_rank(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a part's, with zeros for what is padding."""
        if self.rows is None:
            return x
        plan = self.rows.blocks(self.rows.full // x.shape[0])
        found = x.new_zeros(plan.size, *x.shape[1:])
        for piece in plan.own:
            found[piece.target : piece.target + piece.count] = x[piece.source : piece.source + piece.count]
        return found

    def cut(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """This rank's piece of the stored tensor, on ``device``, with zeros for what is padding."""
        if self.turn is not None:
            return tensor.to(device)
        piece = self._own(tensor).to(device)
        if self.rows is None or not self.rows.has_padding:
            return piece
        sizes = tuple(
            self.rows.blocks(dim.per).size * dim.count if dim.axis == "out" else size
            for dim, size in zip(self.stored.dims, piece.shape, strict=True)
        )
        whole = torch.zeros(sizes, dtype=piece.dtype, device=device)
        whole[tuple(map(slice, piece.shape))] = piece
        return whole

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The window of ``tensor``; of rows that parts share, that of each part. A view, unless parts lie apart."""
        stack, axes = self.module.stack, [axis for axis, dim in enumerate(self.stored.dims) if dim.axis == "out"]
        if stack is None or stack.parts == 1 or self.rows is None or not axes:
            return tensor[self.window]
        (axis,) = axes
        window = list(self.window)
        window.insert(axis + 1 if stack.interleaved else axis, slice(None))
        sizes = (-1, stack.parts) if stack.interleaved else (stack.parts, -1)
        apart: torch.Tensor = tensor.unflatten(axis, sizes)
        return apart[tuple(window)].flatten(axis, axis + 1)

    @property
    def window(self) -> tuple[slice, ...]:
        """Where this rank's piece lies in the stored tensor. It is one block, which plans of several slices are not."""
        found = []
        for dim in self.stored.dims:
            plan = {"out": self.rows, "in": self.columns, "expert": self.experts, None: None}[dim.axis]
            pieces = plan.blocks(dim.per).own if plan else None
            if pieces is None:
                found.append(slice(None))
            elif not pieces:
                found.append(slice(0, 0))
            else:
                (piece,) = pieces
                found.append(slice(piece.source * dim.count, (piece.source + piece.count) * dim.count))
        return tuple(found)


@dataclass(frozen=True)
class Grouped:
    """The place of a tensor whose rows come in ``groups`` of equal size, each with rows of several slots in turn.

    ``parts`` are the address of each slot, and its rows in a group. Qwen3-Next's projections have a group for each key
    head.
    """

    groups: int
    parts: tuple[tuple[str, int], ...]

    @property
    def turns(self) -> dict[str, Turn]:
        """The turn of the part for each address."""
        sizes = tuple(rows for _, rows in self.parts)
        return {address: Turn(self.groups, sizes, place) for place, (address, _) in enumerate(self.parts)}

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The part for each address: rows of the first group, then of the second, and so on."""
        return {address: turn.of(tensor) for address, turn in self.turns.items()}


Address = str | Grouped
"""Where a plain tensor goes: ``"layer.path.slot"``, ``"layer.path.slot[part]"``, or to several slots."""


def under(prefix: str, address: Address) -> Address:
    """``address`` within the layer whose path is ``prefix``, which ends with a dot."""
    if isinstance(address, str):
        return prefix + address
    return Grouped(address.groups, tuple((prefix + slot, rows) for slot, rows in address.parts))


def first_slot(address: Address) -> str:
    """The address of the slot, or the first of the slots: all are in one block."""
    return address if isinstance(address, str) else address.parts[0][0]


WeightNames = Mapping[str, Address | tuple[Reading, ...] | None]
"""For each tensor of a checkpoint, by name: the slot that it is copied to (``"layer.path.slot"``, or
``"layer.path.slot[part]"``), how each of its parts is read, or None where it may be there but is not needed. The name
``module.*`` with None stands for all tensors of a module.

In place of a part, a slot that is a stack may have the order of the tensor that holds it whole: ``[interleaved]``, with
rows of the slot's parts in turn (gate, up, gate, up, ...); ``[transposed]``, each matrix by columns; or both,
``[interleaved,transposed]``. A slot without parts may have ``[transposed]``, for a matrix that is stored by columns, as
GPT-2 does it, or ``[plus_one]``: one is added to each number, in float32, as Gemma stores the weights of norms."""
