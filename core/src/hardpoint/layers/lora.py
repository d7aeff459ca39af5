"""The LoRA adapters of one linear layer: its low-rank matrices, for every slot that an adapter may take.

Axes: P parts of the layer, S slots, R rank of a slot, K elements of the input on this rank, N of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.ops.add_lora import add_lora
from hardpoint_plugin_api import LinearArgs, WeightSlot

Matrix = Literal["A", "B"]
"""The update of a weight [N, K] is ``B @ A``: A is [r, K], B is [N, r] (arXiv:2106.09685)."""
MATRICES: tuple[Matrix, ...] = get_args(Matrix)


class LinearAdapters:
    """Slots of size R for each part; a slot holds zeros where its adapter has no matrices for the part.

    Ranks divide A as they divide the layer's columns, and B as its rows.
    """

    def __init__(self, ctx: Context, args: LinearArgs) -> None:
        self._args, self._dtype, self._device = args, ctx.dtype, ctx.torch_device
        self._slots, self._rank = ctx.config.num_adapters, ctx.config.max_lora_rank
        self._add = add_lora.bind(ctx)
        self._names = [name for name, _ in args.own_parts]
        self._a: list[torch.Tensor] = []
        self._b: list[torch.Tensor] = []

    def allocate(self) -> None:
        """Take memory for all slots, full of zeros: A [S, R, K] and B [N, S, R] for each part."""
        slots, rank = self._slots, self._rank

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        self._a = [zeros(slots, rank, self._args.own_in_features) for _ in self._names]
        self._b = [zeros(rows, slots, rank) for _, rows in self._args.own_parts]

    def drop(self) -> None:
        """Give the memory back."""
        self._a, self._b = [], []

    def has(self, part: str | None) -> bool:
        """Whether ``part`` is one of the layer; None stands for the only part of a layer that has one."""
        return part in self._names or (part is None and len(self._names) == 1)

    def declare(self, part: str | None, rank: int) -> Mapping[Matrix, WeightSlot]:
        """The matrices of ``part`` on this rank, of an adapter of rank ``rank``."""
        args, dtype, number = self._args, dtype_name(self._dtype), self._number(part)
        columns = (args.column_shard,) if args.column_shard else ()
        rows = args.row_shards[number : number + 1]
        return {
            "A": WeightSlot((rank, args.own_in_features), dtype, 1 if columns else None, shards=columns),
            "B": WeightSlot((args.own_parts[number][1], rank), dtype, 0 if rows else None, shards=rows),
        }

    def place(self, slot: int, part: str | None, matrix: Matrix, rank: int) -> torch.Tensor:
        """The view that a matrix of rank ``rank`` fills, shaped as ``declare`` says."""
        number = self._number(part)
        return self._a[number][slot, :rank] if matrix == "A" else self._b[number][:, slot, :rank]

    def clear(self, slot: int) -> None:
        """Fill a slot with zeros, where there is memory for it."""
        for a, b in zip(self._a, self._b, strict=True):
            a[slot].zero_()
            b[:, slot].zero_()

    def add_to(self, y: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor) -> None:
        """Add to y [T, N] the updates of x [T, K] by ``adapters``, int32 [T], see ForwardStep. Mutates y."""
        start = 0
        for a, b in zip(self._a, self._b, strict=True):
            self._add(y[:, start : start + b.shape[0]], x, a, b, adapters)
            start += b.shape[0]

    def _number(self, part: str | None) -> int:
        return 0 if part is None else self._names.index(part)
