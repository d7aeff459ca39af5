"""Metrics of an engine and its plugins: a registry of its own for each engine, read as a snapshot.

Names are ``hardpoint_steps_total`` for core's metrics and ``hardpoint_acme_calls_total`` for the plugin acme's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from hardpoint.plugin_host.record import CORE
from hardpoint_plugin_api import PluginError

_NAME = re.compile(r"[a-z](_?[a-z0-9])*")
_RESERVED_ENDINGS = ("_total", "_created", "_bucket", "_sum", "_count", "_info")
"""Suffixes that Prometheus adds to names itself."""
STAGE_LABEL = "pipeline_stage"
_RESERVED_LABELS = {"le", "quantile", STAGE_LABEL}

M = TypeVar("M", Counter, Gauge, Histogram)


class EngineMetrics:
    """The metrics of one engine. ``for_plugin`` gives a plugin the door through which it declares its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._declared: dict[str, tuple[str, Counter | Gauge | Histogram, tuple[object, ...]]] = {}

    def for_plugin(self, plugin: str) -> PluginMetrics:
        """The metrics of ``plugin``, whose names carry its name; core's carry none."""
        return PluginMetrics(self, plugin)

    def add(self, collector: Collector) -> None:
        """Read what core keeps elsewhere whenever metrics are read."""
        self._registry.register(collector)

    def snapshot(self) -> MetricsSnapshot:
        """The values of now."""
        return MetricsSnapshot.of_registry(self._registry)

    def declare(
        self, plugin: str, name: str, kind: type[M], labels: Sequence[str], make: Callable[[str, CollectorRegistry], M]
    ) -> M:
        """Return the metric of this name, made by ``make(full_name, registry)`` where it is new.

        Raises PluginError for an invalid name or label, and where another kind of metric has the name already.
        """
        full = f"hardpoint_{name}" if plugin == CORE else f"hardpoint_{plugin}_{name}"
        _check(plugin, name, labels)
        shape = (kind, tuple(labels))
        if full not in self._declared:
            self._declared[full] = (plugin, make(full, self._registry), shape)
        owner, metric, known = self._declared[full]
        if (owner, known) != (plugin, shape):
            raise PluginError(
                f"plugin {plugin}: metric {name!r} is declared as {_described(shape)}, but plugin {owner} has declared "
                f"{full} as {_described(known)}; give one of them another name"
            )
        return cast(M, metric)


@dataclass(frozen=True)
class PluginMetrics:
    """One plugin's door to an engine's metrics. See hardpoint_plugin_api.Metrics."""

    _engine: EngineMetrics
    plugin: str

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter; see EngineMetrics.declare for what is raised."""
        return self._engine.declare(
            self.plugin, name, Counter, labels, lambda full, registry: Counter(full, help, labels, registry=registry)
        )

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge; see EngineMetrics.declare for what is raised."""
        return self._engine.declare(
            self.plugin, name, Gauge, labels, lambda full, registry: Gauge(full, help, labels, registry=registry)
        )

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] | None = None
    ) -> Histogram:
        """Declare a histogram; see EngineMetrics.declare for what is raised."""
        bounds = Histogram.DEFAULT_BUCKETS if buckets is None else tuple(buckets)
        if list(bounds) != sorted(set(bounds)) or not bounds:
            raise PluginError(
                f"plugin {self.plugin}: metric {name!r}: buckets must be upper bounds, ascending, got {list(bounds)}"
            )
        return self._engine.declare(
            self.plugin,
            name,
            Histogram,
            labels,
            lambda full, registry: Histogram(full, help, labels, registry=registry, buckets=bounds),
        )


@dataclass(frozen=True)
class MetricsSnapshot(Collector):
    """An engine's metrics at one moment. Plain data: it can be sent from one process to another.

    A server's own Prometheus collector answers ``collect`` with the ``families`` of a fresh one.
    """

    families: tuple[Metric, ...]

    def collect(self) -> Iterable[Metric]:
        """The metrics, each with its samples."""
        return self.families

    def with_those_of(self, other: MetricsSnapshot) -> MetricsSnapshot:
        """These, with the values of ``other`` for what that has too, and with what only that has."""
        known = {family.name: family for family in self.families}
        return MetricsSnapshot(tuple((known | {family.name: family for family in other.families}).values()))

    @classmethod
    def of_registry(cls, registry: CollectorRegistry) -> MetricsSnapshot:
        """The values of now of what ``registry`` has."""
        families = tuple(registry.collect())
        for family in families:  # when each was made is of no use to anyone, and doubles the text
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return cls(families)

    @classmethod
    def total_of(cls, parts: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
        """Metrics of several processes that count alike: of each sample the sum."""
        joined: dict[str, tuple[Metric, dict[tuple[object, ...], Sample]]] = {}
        for family in (family for part in parts for family in part.families):
            own = Metric(family.name, family.documentation, family.type, family.unit)
            _, samples = joined.setdefault(family.name, (own, {}))
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                before = samples[key].value if key in samples else 0.0
                samples[key] = sample._replace(value=before + sample.value)
        for family, samples in joined.values():
            family.samples = list(samples.values())
        return cls(tuple(family for family, _ in joined.values()))

    @property
    def counters(self) -> MetricsSnapshot:
        """The counters alone, which stay true after a process has ended."""
        return MetricsSnapshot(tuple(family for family in self.families if family.type in ("counter", "histogram")))

    @classmethod
    def of_stages(cls, stages: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
        """The metrics of pipeline stages: each sample has its stage's number as the label STAGE_LABEL."""
        joined: dict[str, Metric] = {}
        for number, stage in enumerate(stages):
            for family in stage.families:
                own = Metric(family.name, family.documentation, family.type, family.unit)
                joined.setdefault(family.name, own).samples += [
                    sample._replace(labels={**sample.labels, STAGE_LABEL: str(number)}) for sample in family.samples
                ]
        return cls(tuple(joined.values()))

    def value(self, name: str, **labels: str) -> float:
        """One sample's value, by its full name: ``hardpoint_steps_total``. Raises KeyError, naming those there are."""
        samples = [sample for family in self.families for sample in family.samples]
        for sample in samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
        known = ", ".join(sorted({sample.name for sample in samples}))
        raise KeyError(f"no sample {name!r} with labels {labels}; there are {known}")

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this full name that have ``labels``, and perhaps others; 0 where there is none."""
        samples = [sample for family in self.families for sample in family.samples]
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

    def to_prometheus(self) -> str:
        """The text that Prometheus scrapes."""
        return generate_latest(cast(CollectorRegistry, self)).decode()


def _check(plugin: str, name: str, labels: Sequence[str]) -> None:
    shape = "lower-case letters, digits and single underscores, a letter first"
    if not _NAME.fullmatch(name):
        raise PluginError(f"plugin {plugin}: metric {name!r}: a name is {shape}, such as 'tiles_computed'")
    for ending in _RESERVED_ENDINGS:
        if name.endswith(ending):
            raise PluginError(
                f"plugin {plugin}: metric {name!r}: Prometheus itself adds {ending!r}; declare "
                f"{name.removesuffix(ending)!r}"
            )
    for label in labels:
        if not _NAME.fullmatch(label) or label in _RESERVED_LABELS:
            reserved = ", ".join(sorted(_RESERVED_LABELS))
            raise PluginError(
                f"plugin {plugin}: metric {name!r}: a label is {shape}, and none of {reserved}; got {label!r}"
            )


def _described(shape: tuple[object, ...]) -> str:
    kind, labels = shape
    text = cast(type, kind).__name__.lower()
    return f"a {text} labelled {', '.join(cast('tuple[str, ...]', labels))}" if labels else f"a {text} without labels"
