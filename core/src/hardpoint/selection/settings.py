"""The user's choices, as the selector needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hardpoint_plugin_api import FAMILIES, LinearWorkload, Reason, Workload


@dataclass(frozen=True)
class Choice:
    """A candidate asked for by name, and the flag that asked.

    ``where_offered`` says that it was asked for in a whole family: of what it is not offered for, others are chosen.
    """

    name: str
    flag: str
    where_offered: bool = False


@dataclass(frozen=True)
class Settings:
    """The user's choices: by family (``"linear"``) or slot (``"op.rms_norm"``), and which custom ops are on.

    Of a family whose kinds core lists, such as attention, a choice by family holds wherever that name is offered; one
    by slot (``"attention.causal"``) comes before it.

    ``custom_ops`` holds at most one of ``all`` and ``none``, and ``+name`` and ``-name``; an op that is off runs in
    core's own form: its reference, row by row where batches must not matter, or composed of other ops. ``by_use`` are
    those of the choices that were written as ``--use``, for messages. Where the model is ``quantized``, the choice for
    ``linear`` holds for its quantized matrices, and others are chosen for automatically.
    """

    choices: Mapping[str, str] = field(default_factory=dict)
    custom_ops: tuple[str, ...] = ("all",)
    by_use: frozenset[str] = frozenset()
    quantized: bool = False

    def choice_for(self, workload: Workload) -> Choice | None:
        """The user's choice for what ``workload`` asks, or None for automatic."""
        if isinstance(workload, LinearWorkload) and self.quantized and workload.spec and workload.spec[0].is_plain:
            return None
        return self.choice(workload.family, workload.of)

    def choice(self, family: str, of: str | None) -> Choice | None:
        """The user's choice for one slot, or None for automatic."""
        if of is not None and f"{family}.{of}" in self.choices:
            return Choice(self.choices[f"{family}.{of}"], f"--use {family}.{of}")
        if family in self.choices:
            own_flag = None if family in self.by_use else FAMILIES[family].flag
            return Choice(self.choices[family], own_flag or f"--use {family}", bool(FAMILIES[family].kinds))
        return None

    def op_switched_off(self, op: str) -> Reason | None:
        """Say why plugins' kernels for ``op`` are switched off, or None where they are on."""
        on = "none" not in self.custom_ops
        if f"+{op}" in self.custom_ops:
            on = True
        if f"-{op}" in self.custom_ops:
            on = False
        if on:
            return None
        return Reason(
            "custom-op-off",
            f"plugins' kernels for op {op} are switched off; core's own runs",
            supported=f"--custom-ops {','.join(self.custom_ops)}",
            fix=f"--custom-ops +{op}",
        )
