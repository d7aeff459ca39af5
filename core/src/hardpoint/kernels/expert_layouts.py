"""Experts whose matrices are laid out in tiles, one by one, as those of linear layers are.

A gate's rows and those of what it gates lie in turns, so that a program has both of them.

Axes: P pairs, E experts, I width of an expert, N rows of a matrix (out), K its columns (in).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
import triton
import triton.language as tl

from hardpoint.experts.middle import unsupported_activation
from hardpoint.kernels.activation import activate, gated
from hardpoint.kernels.launch import in_stages_that_fit
from hardpoint.kernels.pair_lists import PairList
from hardpoint.kernels.paired_experts import PairedExperts, Pairs
from hardpoint.kernels.weight_only import Tiles
from hardpoint_plugin_api import BuildContext, DeviceInfo, ExpertsWorkload, QuantSpec, Reason
from hardpoint_plugin_api.experts import MATRICES, expert_matrix


class ExpertCut(Protocol):
    """A tile of one expert's products: ``rows`` pairs, and blocks of columns on their way at a time."""

    @property
    def rows(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


C = TypeVar("C", bound=ExpertCut)
L = TypeVar("L", bound=Tiles)


class LaidOutExperts(PairedExperts[C], Generic[C, L]):
    """Quantized experts in tiles of the kind C, each matrix laid out by an L; activations as they are."""

    most_rows = 128
    tile_rows: ClassVar[int]
    """Rows of a matrix that lie together."""

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        self._tiles = {}
        for name, columns in (("w13", self._hidden), ("w2", self._width)):
            specs = workload.spec_of(name)
            assert specs is not None
            self._tiles[name] = self.tiles_of(specs[0], columns, ctx.dtype)

    @staticmethod
    @abstractmethod
    def tiles_of(spec: QuantSpec, columns: int, dtype: torch.dtype) -> L:
        """The layout of a matrix of so many columns."""

    @staticmethod
    @abstractmethod
    def unsupported(spec: QuantSpec, columns: int) -> list[Reason]:
        """Say why a matrix of so many columns cannot be laid out."""

    @abstractmethod
    def launch(
        self, name: str, cut: C, x: torch.Tensor, out: torch.Tensor, listed: PairList, pairs: Pairs, num_stages: int
    ) -> None:
        """Write ``out`` [P, .]: rows of ``x`` [P / K or P, .] times the matrix ``name`` of their experts."""

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse activations that are not known, columns that have no layout, and rows that tiles do not divide."""
        reasons = unsupported_activation(workload.activation)
        for matrix, name, columns, least in (
            ("w13", "hidden_size", workload.hidden_size, cls.tile_rows),
            ("w2", "intermediate_size", workload.intermediate_size, cls.tile_rows // 2),  # a gate has as many again
        ):
            specs = workload.spec_of(matrix)
            if specs is None or columns is None:
                continue
            reasons += cls.unsupported(specs[0], columns)
            if columns % least:
                reasons.append(Reason(name, name, wanted=str(columns), supported=f"multiples of {least}"))
        return reasons

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each expert's matrix as the layout has it; rows of a gate and of what it gates by turns."""
        packed: dict[str, torch.Tensor] = {}
        for name in MATRICES:
            each = [self._packed(name, expert_matrix(weights, name, e)) for e in range(self._experts)]
            packed |= {f"{name}.{slot}": torch.stack([one[slot] for one in each]) for slot in each[0]}
        return packed

    def _packed(self, name: str, slots: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One expert's matrix."""
        if name == "w13" and self._gated:
            slots = {slot: w.unflatten(0, (2, self._width)).transpose(0, 1).flatten(0, 1) for slot, w in slots.items()}
        bias = {"bias": slots.pop("bias")} if "bias" in slots else {}
        return self._tiles[name].packed(slots) | bias

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name in MATRICES:
            each = [expert_matrix(weights, name, number) for number in range(self._experts)]
            found[name] = torch.stack([self._tiles[name].unpacked(slots) for slots in each])
        if self._gated:
            found["w13"] = found["w13"].unflatten(1, (self._width, 2)).transpose(1, 2).flatten(1, 2)
        return found

    def multiply(self, tiling: C, pairs: Pairs) -> None:
        pair_list = self._lists.of(pairs.ids, pairs.lists, tiling.rows)
        for name, x, out in (("w13", pairs.x, pairs.middle), ("w2", pairs.middle, pairs.results)):
            launch = partial(self.launch, name, tiling, x, out, pair_list, pairs)
            in_stages_that_fit((name, tiling, self.workload, x.device), tiling.num_stages, launch)


@triton.jit
def store_pairs(
    y,
    bias,
    out,
    expert,
    pairs,
    tile_n,
    num_pairs,
    N,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Float32 ``y`` [BLOCK_N, BLOCK_M], products with rows ``tile_n * BLOCK_N`` and on, to rows ``pairs`` of ``out``.

    With ``GATED`` rows of the weight are a gate's and what it gates by turns, and out has half as many columns.
    ``bias`` is [E, N], or None. Nothing is stored of pairs from ``num_pairs`` on, or of rows from N on.
    """
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias is not None:
        y = y + tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    y = y.to(dtype)
    if GATED:
        gate, up = tl.split(y.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
        y = gated(gate, up, ACTIVATION)
        columns, at = N // 2, tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        if ACTIVATION is not None:
            y = activate(y.to(tl.float32), ACTIVATION).to(dtype)
        columns, at = N, n
    targets = out + pairs.to(tl.int64)[None, :] * columns + at[:, None]
    tl.store(targets, y, mask=(pairs < num_pairs)[None, :] & (at < columns)[:, None])
