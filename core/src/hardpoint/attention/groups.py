"""The attention layers of a model under construction, and the groups that plan together."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardpoint_plugin_api import AttentionBackend, AttentionSpec


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: where it is, what it is, and what serves it."""

    path: str
    spec: AttentionSpec
    backend: AttentionBackend


@dataclass
class AttentionLayers:
    """Attention layers in the order of construction; the index of a layer is its place in a step's lists."""

    layers: list[AttentionLayer] = field(default_factory=list)

    def add(self, layer: AttentionLayer) -> int:
        """Append ``layer`` and return its index."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def groups(self) -> list[list[int]]:
        """Indices of the layers that share one plan per step: equal spec, equal backend class."""
        groups: dict[tuple[AttentionSpec, type[AttentionBackend]], list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault((layer.spec, type(layer.backend)), []).append(index)
        return list(groups.values())
