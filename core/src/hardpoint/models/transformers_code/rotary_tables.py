"""Cosines and sines of a model's rotary module, tabulated once for all positions that the engine serves.

A module is recognised by what it computes: numbers of each token that follow from its position alone. Its own code
makes the table, whatever the scaling. Attention that runs as FusedAttention reads rows of the table. Other code that
asks for cosines and sines gets those that the module computes.

Axes: T tokens, P positions, R rotated elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import nn

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer
from hardpoint.models.transformers_code.current import Current, rotary_pair
from hardpoint.models.transformers_code.trial import agree, wide

Buffers = Mapping[str, torch.Tensor]
_Own = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_CHUNK = 4096
"""Positions that the module's code is called with at once: it makes some eight tensors of them, [1, P, R] each."""


class Angles(Sequence[torch.Tensor]):
    """Takes the place of the cosines and sines [1, T, R] of a step, which are computed where code asks for one."""

    def __init__(self, tables: RotaryTable, like: torch.Tensor, positions: torch.Tensor) -> None:
        self._tables, self._dtype, self._device, self._positions = tables, like.dtype, like.device, positions
        self._computed: tuple[torch.Tensor, torch.Tensor] | None = None

    def table(self, in_a_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As Current.table, without computing anything."""
        return self._tables.tables[in_a_row], self._positions[0]

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if self._computed is None:
            like = torch.empty(1, 1, 1, dtype=self._dtype, device=self._device)
            self._computed = self._tables.own(like, self._positions)
        return self._computed[index]

    def __len__(self) -> int:
        return 2


class RotaryTable(PluggableLayer):
    """The tables of one rotary module, whose ``forward`` returns Angles from now on.

    ``kinds``: for each of them, whether a module's code gives each angle twice in a row, not in halves; see Turn.
    ``buffers``: what the module computed when it was constructed, on the host. ``tables``: float32 [P, R] by kind.
    """

    def __init__(self, ctx: Context, module: Any, buffers: Buffers, kinds: frozenset[bool], current: Current) -> None:
        super().__init__(ctx)
        self._module, self._host, self._kinds, self._current = (module,), dict(buffers), kinds, current
        self._dtype, self._device, self._num_positions = ctx.dtype, ctx.torch_device, ctx.max_model_len
        self.own: _Own = module.forward
        self.tables: dict[bool, torch.Tensor] = {}
        module.forward = self._angles

    def _angles(self, x: torch.Tensor, position_ids: torch.Tensor) -> Sequence[torch.Tensor]:
        """x of any shape, position_ids [1, T] -> cosines and sines [1, T, R], of x's dtype."""
        if self._current.is_traced or x.dtype != self._dtype or position_ids.shape[:-1] != (1,):
            return self.own(x, position_ids)
        return Angles(self, x, position_ids)

    @torch.no_grad()
    def bind(self) -> None:
        like = torch.empty(1, 1, 1, dtype=self._dtype)
        found: dict[bool, list[torch.Tensor]] = {kind: [] for kind in self._kinds}
        with on_host(self._module[0], self._host):
            for positions in torch.arange(self._num_positions).split(_CHUNK):
                cos, sin = self.own(like, positions[None])
                for kind, rows in found.items():
                    rows.append(rotary_pair(cos, sin, kind))
        self.tables = {kind: torch.cat(rows).to(self._device) for kind, rows in found.items()}

    def release(self) -> None:
        self.tables = {}
        super().release()


@contextmanager
def on_host(module: nn.Module, buffers: Buffers) -> Iterator[None]:
    """``module`` with its buffers on the host."""
    own = dict(module._buffers)
    module._buffers.update(buffers)
    try:
        yield
    finally:
        module._buffers.update(own)


@torch.no_grad()
def is_tabulable(module: nn.Module, buffers: Buffers, dtype: torch.dtype, num_positions: int) -> bool:
    """Whether ``module`` computes two tensors [1, T, R] of x and position_ids, each token's from its position alone.

    ``buffers`` as in RotaryTable. A module that changes its buffers does not count.
    """
    names = list(inspect.signature(module.forward).parameters)
    if names[1:] != ["position_ids"] or next(module.children(), None) or next(module.parameters(), None) is not None:
        return False
    positions = torch.cat([torch.randint(num_positions, (4,)), torch.tensor([num_positions - 1, 0])])[None]
    copies = {name: value.clone() for name, value in buffers.items()}
    try:
        with on_host(module, copies):
            whole = module.forward(wide(1, positions.shape[1], 8, dtype=dtype), positions)
            each = [module.forward(wide(1, 1, 4, dtype=dtype), one[:, None]) for one in positions.unbind(1)]
            kept = all(module._buffers[name] is copies[name] for name in copies)
    except Exception:  # code of hundreds of models
        return False
    if not (isinstance(whole, tuple) and len(whole) == 2 and kept):
        return False
    same = all(torch.equal(copies[name], buffers[name]) for name in copies)
    return same and all(_rows_agree(x, rows, dtype) for x, rows in zip(whole, zip(*each, strict=True), strict=True))


def _rows_agree(whole: Any, rows: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether ``whole`` [1, T, R] holds ``rows`` [1, 1, R], and R is even."""
    wanted = torch.cat(list(rows), 1)
    return wanted.ndim == 3 and wanted.dtype == dtype and wanted.shape[-1] % 2 == 0 and agree(whole, wanted)
