"""A contribution: one candidate of a family, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hardpoint_plugin_api.requirements import (
    FeatureRequirement,
    OneOfRequirement,
    Requirement,
    SpecRequirement,
)

PLAIN_SPECS = SpecRequirement(("*float??/*float??",))
"""Weights and activations that are not quantized: what a matrix product without ``spec`` serves."""

Form = Literal["functional", "out", "factory"]
"""Forms of an op contribution's target.

``functional``: ``f(*inputs, **scalars) -> outputs``. ``out``: ``f(*inputs, *outputs, **scalars) -> None`` into
caller-owned outputs. ``factory``: ``f(context, workload, parts) -> functional``, called once when the op is bound.
"""


@dataclass(frozen=True)
class Preference:
    """A priority that replaces the contribution's own where all of ``requires`` hold."""

    priority: int
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Contribution:
    """One candidate of a family, declared in ``hardpoint.toml``. Plain data; importing nothing.

    ``name`` is what users type, unique per (family, of). ``target`` is ``"package.module:attribute"``, imported when
    the contribution comes first for a workload. ``platforms``: empty means any. The highest ``priority`` wins; ties are
    decided by name. ``replaces``: a contribution of the same family and ``of`` whose place this one takes. ``layout``:
    the cache or weight layout; all winners of one plan have the same. ``preferred``: the first entry that holds for a
    workload, a device and a step replaces ``priority`` there; it extends nothing that ``requires`` excludes.
    """

    family: str
    name: str
    target: str
    of: str | None = None
    platforms: tuple[str, ...] = ()
    priority: int = 0
    summary: str = ""
    requires: tuple[Requirement, ...] = ()
    replaces: str | None = None
    form: Form = "functional"
    layout: str = "plain"
    preferred: tuple[Preference, ...] = ()

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """All requirements, the implied ones included.

        Implied: no workload features; for experts, activations in the standard format; for linear and experts kernels,
        weights that are not quantized. A contribution claims more by a requirement of its own.
        """
        implied: tuple[Requirement, ...] = ()
        if not any(isinstance(r, FeatureRequirement) for r in self.requires):
            implied = (FeatureRequirement(()),)
        if self.family == "experts" and not any(getattr(r, "key", None) == "format" for r in self.requires):
            implied = (*implied, OneOfRequirement("format", ("standard",)))
        if self.family in ("linear", "experts") and not any(isinstance(r, SpecRequirement) for r in self.requires):
            implied = (*implied, PLAIN_SPECS)
        return (*self.requires, *implied)

    @property
    def slot(self) -> tuple[str, str | None]:
        """The place that candidates compete for: the family, and the op, layer or architecture within it."""
        return self.family, self.of

    def __str__(self) -> str:
        return f"{self.family} {self.of}: {self.name}" if self.of else f"{self.family}: {self.name}"
