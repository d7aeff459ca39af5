"""Choices on which all ranks of an engine must agree, as plain data that travels and compares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from hardpoint.parallel.topology import Topology
from hardpoint_plugin_api import ConfigError, HardpointError

if TYPE_CHECKING:
    from hardpoint.config import EngineConfig
    from hardpoint.engine.blueprint import Blueprint
    from hardpoint.parallel.control import ControlGroup

Rows = tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True)
class Choices:
    """The plugins in their order, each as name, distribution, version and entry value; and who serves what."""

    plugins: Rows
    selections: Rows
    digest: str

    @classmethod
    def of(cls, blueprint: Blueprint) -> Self:
        """The choices of a blueprint."""
        table = blueprint.table
        return cls(_frozen(blueprint.plugins.identities()), _frozen(table.serving), table.digest)

    def differences(self, other: Choices, name: str, other_name: str) -> str:
        """A line for each row that one has and the other has not; ``name`` is who has these."""
        lines = []
        for what in ("plugins", "selections"):
            here, there = getattr(self, what), getattr(other, what)
            only_here = [f"  {name} only: {_written(row)}" for row in here if row not in there]
            only_there = [f"  {other_name} only: {_written(row)}" for row in there if row not in here]
            if here != there:
                lines += [f"{what}:", *only_here, *only_there] if only_here or only_there else [f"{what}: their order"]
        return "\n".join(lines)


def check_same_config(control: ControlGroup, own: EngineConfig) -> None:
    """Raise ConfigError, on every rank, where ranks were given other settings than rank 0. The message shows them."""
    first, *others = control.exchange(_given(own))
    for rank, settings in enumerate(others, 1):
        if settings != first:
            keys = sorted(key for key in first.keys() | settings.keys() if settings.get(key) != first.get(key))
            differing = "; ".join(
                f"{key} = {settings.get(key, 'not given')!s}, on rank 0 {first.get(key, 'not given')!s}" for key in keys
            )
            raise ConfigError(f"rank {rank} was given other settings than rank 0, and all need the same: {differing}")


def _given(config: EngineConfig) -> dict[str, object]:
    """The user's settings that all must have. The rest follows from them, and from plugins, which are compared too."""
    settings = config.model_dump()
    found: dict[str, object] = {}
    for key in config.explicit_on_all_servers:
        section, dot, name = key.partition(".")
        found[key] = settings["plugin_config"][section][name] if dot else settings[key]
    return found


def check_equal(control: ControlGroup, own: Choices, topology: Topology, expected: Choices | None = None) -> None:
    """Raise HardpointError, on every rank, where one has other choices than ``expected``, by default rank 0's.

    Later pipeline stages have layers of their own: their plugins are compared with those expected, and their selections
    within the stage. The message shows what differs.
    """
    everyone = control.exchange(own)
    title, wanted = ("rank 0", everyone[0]) if expected is None else ("the engine's own process", expected)
    of_stages = {0: (title, wanted)}
    for rank, found in enumerate(everyone):
        stage = topology.stage_of(rank)
        if stage not in of_stages:
            first = replace(found, plugins=wanted.plugins)
            of_stages[stage] = f"rank {rank}" if found == first else title, first
        title, wanted = of_stages[stage]
        if found != wanted:
            raise HardpointError(
                f"rank {rank} does not agree with {title}; every rank must have the same plugins in the same versions, "
                f"the same config and the same kind of device:\n{wanted.differences(found, title, f'rank {rank}')}"
            )


def _frozen(rows: list[list[str | None]]) -> Rows:
    return tuple(map(tuple, rows))


def _written(row: tuple[str | None, ...]) -> str:
    return " ".join(cell for cell in row if cell)
