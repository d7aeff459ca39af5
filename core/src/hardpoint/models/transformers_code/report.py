"""The modules of a model that runs by Transformers' code: which layers took their place, and which stay."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass
class Report:
    """``replaced`` counts modules by the layer that took their place. ``kept``: classes that stay, with the reason.

    ``fused`` counts modules whose code between layers is fused ops: "attention", and decoder "layers". ``tabulated``
    counts rotary modules with a table; see RotaryTable.
    """

    title: str
    replaced: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    tabulated: int = 0
    kept: dict[str, tuple[list[str], str]] = field(default_factory=dict)

    def keep(self, kind: str, path: str, reason: str) -> None:
        """Note a module that stays as it is."""
        self.kept.setdefault(kind, ([], reason))[0].append(_NUMBER.sub(".*", path))

    def lines(self) -> Iterator[str]:
        """The report as text."""
        counts = ", ".join(f"{count} {name}" for name, count in self.replaced.items())
        yield f"{self.title} runs by Transformers' own code; Hardpoint's layers in it: {counts}"
        if count := self.fused["attention"]:
            yield f"{count} calls of attention norm and rotate heads and write to the cache in one op"
        if count := self.fused["layers"]:
            yield f"{count} decoder layers add the residual and norm the sum in one op"
        if self.tabulated:
            yield f"{self.tabulated} rotary modules have a table of all positions for them"
        for kind, (paths, reason) in self.kept.items():
            where = ", ".join(dict.fromkeys(paths))
            yield f"{len(paths)} {kind} stay as they are ({where}): {reason}"
