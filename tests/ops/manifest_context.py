"""A small stand-in for the engine's context: resolves ops from core's own manifest, by priority alone."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch

import hardpoint
from hardpoint.kernel_calls import KernelCalls
from hardpoint_plugin_api import MANIFEST_NAME, Contribution, OpWorkload, TokensRequirement, read_manifest

MANIFEST = read_manifest(Path(hardpoint.__file__).parent / MANIFEST_NAME)
OPS = tuple(c for c in MANIFEST.contributions if c.family == "op")


@dataclass(frozen=True)
class Offer:
    """The selector's view of a candidate."""

    contribution: Contribution
    plugin: str = "core"


@dataclass(frozen=True)
class Entry:
    """A winner and its range."""

    range: TokensRequirement
    offer: Offer


@dataclass(frozen=True)
class Plan:
    """One winner for all steps."""

    workload: OpWorkload
    entries: tuple[Entry, ...]


class ManifestContext:
    """``extra`` contributions compete with core's; their targets are looked up in ``targets`` before importing."""

    dtype = torch.float32
    shadow = None
    call_names = None
    op_tracing = None
    kernel_calls = KernelCalls(is_on=False)

    def __init__(self, *extra: Contribution, targets: dict[str, Any] | None = None) -> None:
        self.offers = [Offer(c) for c in (*OPS, *extra)]
        self.targets = targets or {}
        self.asked: list[OpWorkload] = []

    def select(self, workload: OpWorkload) -> Plan:
        """The offers of highest priority, each for its range of tokens."""
        self.asked.append(workload)
        offers = [o for o in self.offers if o.contribution.of == workload.of]
        best = max(o.contribution.priority for o in offers)
        entries = [Entry(_tokens(o.contribution), o) for o in offers if o.contribution.priority == best]
        return Plan(workload, tuple(sorted(entries, key=lambda e: e.range.min)))

    def for_plugin(self, plugin: str) -> ManifestContext:
        """Itself, whoever gets it."""
        return self

    def load(self, offer: Offer) -> Any:
        """Import a target."""
        target = offer.contribution.target
        return self.targets[target] if target in self.targets else load_target(target)


def context(*extra: Contribution, targets: dict[str, Any] | None = None) -> Any:
    """A context, typed as whatever ``bind`` takes."""
    return cast(Any, ManifestContext(*extra, targets=targets))


def load_target(target: str) -> Any:
    """``"package.module:a.b"`` -> the object."""
    module, _, attribute = target.partition(":")
    return reduce(getattr, attribute.split("."), importlib.import_module(module))


def _tokens(contribution: Contribution) -> TokensRequirement:
    return next((r for r in contribution.requires if isinstance(r, TokensRequirement)), TokensRequirement())
