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
"""What the target of an op contribution is.

``functional``: ``f(*inputs, **scalars) -> outputs``. ``out``: ``f(*inputs, *outputs, **scalars) -> None`` into
caller-owned outputs. ``factory``: ``f(context, workload, parts) -> functional``, called once when the op is bound.
"""


@dataclass(frozen=True)
class Preference:
    """The priority of a contribution where all of ``requires`` hold, in place of its own."""

    priority: int
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Contribution:
    """One implementation: what it is, where it is for, what it needs. Declared in ``hardpoint.toml``; imports nothing.

    ``name`` is what users type, unique per (family, of). ``target`` is ``"package.module:attribute"``, imported only
    if this contribution wins. ``platforms`` empty means any. Higher ``priority`` wins; ties go by name. ``replaces``
    names a contribution of the same family and ``of`` that this one takes the place of. ``layout`` names the cache or
    weight layout it works on: all winners of one plan share it. The first of ``preferred`` that holds for a workload,
    a device and a step says the priority there; a preference serves no step that ``requires`` excludes.
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
        """Every requirement, the implied ones included: features, formats of activations other than the standard one,
        and of linear and experts kernels quantized weights, are not supported unless they are claimed."""
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
        """Where it competes: the family, and which op, layer or architecture within it."""
        return self.family, self.of

    def __str__(self) -> str:
        return f"{self.family} {self.of}: {self.name}" if self.of else f"{self.family}: {self.name}"
