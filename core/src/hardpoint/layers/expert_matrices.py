"""Small matrices of a layer's experts, gathered as they come from a checkpoint until a method reads many at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hardpoint.checkpoint.reading import Reading
from hardpoint.numerics import elements_at_once


@dataclass(frozen=True)
class Gathered:
    """Tensors ``names`` in the first rows of ``pieces`` [E, *shape], each with how it is read."""

    pieces: torch.Tensor
    names: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def add(self, name: str, piece: torch.Tensor, reading: Reading) -> bool:
        """Copy one more; returns whether there is no room for another."""
        self.pieces[len(self.names)] = piece
        self.names.append(name)
        self.readings.append(reading)
        return len(self.names) == len(self.pieces)

    def read(self) -> Iterator[tuple[str, Reading, Mapping[str, torch.Tensor]]]:
        """Yield each one's name, and its slots. Raises what the reading does."""
        read = self.readings[0].stored.read_stack
        assert read is not None
        made = read(self.pieces[: len(self.names)])
        for place, (name, reading) in enumerate(zip(self.names, self.readings, strict=True)):
            yield name, reading, {slot: x[place] for slot, x in made.items()}


class ExpertMatrices:
    """Matrices gathered of one layer: of each kind up to ``elements_at_once`` elements."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Gathered] = {}

    def take(self, name: str, piece: torch.Tensor, reading: Reading, kind: tuple[str, str]) -> Gathered | None:
        """Keep a copy of ``piece``, a matrix of a ``kind`` (slot and part). Returns a full set, to be read now."""
        if kind not in self._open:
            self._open[kind] = Gathered(piece.new_empty(_num_together(piece), *piece.shape))
        return self._open.pop(kind) if self._open[kind].add(name, piece, reading) else None

    def rest(self) -> Iterator[Gathered]:
        """Yield the sets that are not full, and forget them."""
        while self._open:
            yield self._open.popitem()[1]


def is_gathered(reading: Reading, piece: torch.Tensor) -> bool:
    """Whether ``piece`` is a matrix of an expert that is read with others."""
    alone = reading.module.expert is None or reading.stored.read_stack is None or reading.turn is not None
    return not alone and _num_together(piece) > 1


def _num_together(piece: torch.Tensor) -> int:
    return elements_at_once(piece.device) // max(1, piece.numel())
