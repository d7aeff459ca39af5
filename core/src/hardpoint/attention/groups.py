"""The attention layers of a model under construction, and the groups that they form.

A cache group is a set of layers that share a block table: of one span, since that decides how long a token is kept.
All groups take pages from one pool, so a page has the same bytes whichever group holds it: it has as many places as
the largest group has layers, and a layer's place is its number within its group. In a model of 24 windowed and 8 full
layers, four groups of eight layers use eight buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hardpoint_plugin_api import AttentionBackend, AttentionSpec, Span

MAX_GROUPS = 8
"""About this many cache groups at most: each costs a block table per step."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: where it is, what it is, and what serves it."""

    path: str
    spec: AttentionSpec
    backend: AttentionBackend


@dataclass(frozen=True)
class CacheGroup:
    """The indices of layers that share a block table, by place, and their span."""

    span: Span
    layers: tuple[int, ...]


@dataclass(frozen=True)
class PlanGroup:
    """The indices of layers that share one plan per step, and the number of their cache group."""

    cache_group: int
    layers: tuple[int, ...]


@dataclass
class AttentionLayers:
    """Attention layers in the order of construction; the index of a layer is its place in a step's lists."""

    layers: list[AttentionLayer] = field(default_factory=list)
    _shared: tuple[Span, ...] = ()

    def add(self, layer: AttentionLayer) -> int:
        """Append ``layer`` and return its index."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def share_groups(self, spans: tuple[Span, ...]) -> None:
        """From now on form a group for each of ``spans``, which include those of these layers: see united_spans.

        A group may be without layers: those of another pipeline stage, with which this one shares block tables.
        """
        self._shared = spans if spans != tuple(group.span for group in self.cache_groups()) else ()

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers by span, each span's cut into groups of the size that leaves the fewest places of a page empty."""
        by_span: dict[Span, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_span.setdefault(layer.backend.cache_spec.span, []).append(index)
        if self._shared:
            return tuple(_divided(by_span, self._shared))
        size = group_size([len(indices) for indices in by_span.values()])
        return tuple(
            CacheGroup(span, tuple(indices[i : i + size]))
            for span, indices in by_span.items()
            for i in range(0, len(indices), size)
        )

    def plan_groups(self) -> tuple[PlanGroup, ...]:
        """Layers of one cache group with equal spec and equal backend class."""
        groups: dict[tuple[int, AttentionSpec, type[AttentionBackend]], list[int]] = {}
        for number, group in enumerate(self.cache_groups()):
            for index in group.layers:
                layer = self.layers[index]
                groups.setdefault((number, layer.spec, type(layer.backend)), []).append(index)
        return tuple(PlanGroup(key[0], tuple(indices)) for key, indices in groups.items())


def united_spans(stages: Iterable[tuple[Span, ...]]) -> tuple[Span, ...]:
    """The spans of the groups of all pipeline stages: of each span as many as the stage that has most."""
    most: Counter[Span] = Counter()
    for spans in stages:
        most |= Counter(spans)
    return tuple(most.elements())


def _divided(by_span: Mapping[Span, list[int]], spans: tuple[Span, ...]) -> Iterator[CacheGroup]:
    """Groups of ``spans``, among which the layers of a span are divided evenly."""
    seen: Counter[Span] = Counter()
    for span in spans:
        indices, first = by_span.get(span, []), seen[span]
        size = -(-len(indices) // spans.count(span))
        yield CacheGroup(span, tuple(indices[first * size : (first + 1) * size]))
        seen[span] += 1


def group_size(counts: list[int]) -> int:
    """How many layers a cache group has at most, where ``counts`` is the number of layers of each span.

    The size for which the groups have the fewest places in all, the largest of such; not so small that there are many
    more than MAX_GROUPS groups.
    """
    smallest = max(1, -(-sum(counts) // MAX_GROUPS))
    return min(range(smallest, max(counts, default=1) + 1), key=lambda size: (places(counts, size), -size))


def places(counts: list[int], size: int) -> int:
    """Places, empty ones included, that layers take in groups of ``size``."""
    return sum(-(-count // size) * size for count in counts)
