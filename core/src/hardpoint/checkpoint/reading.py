"""How a model says where a checkpoint's tensors go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hardpoint_plugin_api import Module, ShardPlan, StoredTensor


@dataclass(frozen=True)
class Reading:
    """A tensor that is read by a quantization scheme, for one module. ``places``: the address of each slot it fills.

    ``rows``, ``columns`` and ``experts`` say how ranks divide the module's matrix, or its stack: what is read is this
    rank's piece. ``rows`` are those of one part of a stack.
    """

    stored: StoredTensor
    module: Module
    places: Mapping[str, str]
    rows: ShardPlan | None = None
    columns: ShardPlan | None = None
    experts: ShardPlan | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        module = self.module
        return self.stored.shape(module.out_features, module.in_features, module.stack.count if module.stack else 1)

    def cut(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """This rank's piece of the stored tensor, on ``device``, with zeros for what is padding."""
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

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The part for each address: rows of the first group, then of the second, and so on."""
        sizes = [rows for _, rows in self.parts]
        pieces = tensor.unflatten(0, (self.groups, sum(sizes))).split(sizes, dim=1)
        return {address: piece.flatten(0, 1) for (address, _), piece in zip(self.parts, pieces, strict=True)}


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


WeightNames = Mapping[str, Address | Reading | None]
"""For each tensor of a checkpoint, by name: the slot that it is copied to (``"layer.path.slot"``, or
``"layer.path.slot[part]"``), how it is read, or None where it may be there but is not needed. The name ``module.*``
with None stands for all tensors of a module.

In place of a part, a slot that is a stack may have the order of the tensor that holds it whole: ``[interleaved]``, with
rows of the slot's parts in turn (gate, up, gate, up, ...); ``[transposed]``, each matrix by columns; or both,
``[interleaved,transposed]``. A slot without parts may have ``[transposed]``, for a matrix that is stored by columns, as
GPT-2 does it, or ``[plus_one]``: one is added to each number, in float32, as Gemma stores the weights of norms."""
