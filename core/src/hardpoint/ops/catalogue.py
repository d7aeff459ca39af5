"""Descriptions of ops as data, for ``hardpoint ops list`` and ``hardpoint ops show NAME``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from hardpoint.ops import get, names


@dataclass(frozen=True)
class OpInfo:
    """One op: ``module`` holds its reference; ``aliases`` are (output index, parameter) pairs that may share memory."""

    name: str
    module: str
    signature: str
    doc: str
    mutates: tuple[str, ...]
    aliases: tuple[tuple[int, str], ...]
    static: tuple[str, ...]
    cases: tuple[str, ...]
    error_model: str

    @property
    def summary(self) -> str:
        """The doc's first sentence or line, whichever ends first."""
        return self.doc.partition("\n")[0].partition(". ")[0].rstrip(".")


def describe(name: str) -> OpInfo:
    """Describe the op called ``name``; raises UnknownNameError with the nearest name."""
    op = get(name)
    cases = op.cases(torch.Generator().manual_seed(0), torch.float32, torch.device("cpu"))
    return OpInfo(
        name=op.name,
        module=op.reference.__module__,
        signature=f"{op.name}{inspect.signature(op.reference)}".replace("torch.", "").replace("'", ""),
        doc=inspect.cleandoc(op.__doc__ or ""),
        mutates=op.mutates,
        aliases=op.aliases,
        static=op.static,
        cases=tuple(case.name for case in cases),
        error_model=str(op.errors),
    )


def describe_all() -> tuple[OpInfo, ...]:
    """Describe every op, by name."""
    return tuple(map(describe, names()))
