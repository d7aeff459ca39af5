"""The server's own metrics; its engine's are in engine/engine_metrics.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.types import Scope

from hardpoint import __version__
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.metrics import MetricsSnapshot
from hardpoint.selection import SelectionTable
from hardpoint.server.request_metrics import RequestMetrics
from hardpoint.server.vllm_metrics import as_vllm


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, models: Sequence[str], *, vllm_names: bool = False) -> None:
        """``models``: names of what is served, the model's own first. ``vllm_names``: under vLLM's names, too."""
        self._vllm_model = models[0] if vllm_names else None
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "hardpoint_http_requests", "Requests answered, by path and status.", ["path", "status"], registry=registry
        )
        self.open_requests = Gauge("hardpoint_http_open_requests", "Requests being answered.", registry=registry)
        self.requests = RequestMetrics(models, vllm_names=vllm_names)
        registry.register(self.requests)

    def answered(self, scope: Scope, status: int) -> None:
        """Count an answer; status 0 is none: the client left before. Paths that no route has count as one."""
        route = scope.get("route")
        self._requests.labels(getattr(route, "path", "other"), str(status)).inc()

    def counted(self) -> MetricsSnapshot:
        """The metrics of this process. To be called in its event loop."""
        num_tasks = len(asyncio.all_tasks())
        tasks = GaugeMetricFamily("hardpoint_server_tasks", "Tasks of the server's event loops.", num_tasks)
        return MetricsSnapshot.of_registry(self.registry).with_those_of(MetricsSnapshot((tasks,)))

    def to_prometheus(
        self,
        counted: MetricsSnapshot,
        engine: MetricsSnapshot | None,
        table: SelectionTable | None,
        recovery: RecoveryState,
        *,
        alive: bool,
    ) -> str:
        """The text that Prometheus scrapes: what all processes have ``counted``, then the engine's where it answers."""
        text = counted.to_prometheus() + MetricsSnapshot(tuple(_state(table, recovery, alive))).to_prometheus()
        if engine is None:
            return text
        if self._vllm_model is not None:
            text += as_vllm(engine, self._vllm_model).to_prometheus()
        return text + engine.to_prometheus()


def _state(table: SelectionTable | None, recovery: RecoveryState, alive: bool) -> Iterator[Metric]:
    yield GaugeMetricFamily("hardpoint_engine_up", "1 while the engine takes requests.", float(alive))
    yield CounterMetricFamily(
        "hardpoint_engine_restarts", "Times that the engine was built again.", float(recovery.num_restarts)
    )
    denied = GaugeMetricFamily(
        "hardpoint_denied_info",
        "Kernels that failed and are not used any more.",
        labels=["plugin", "slot", "implementation"],
    )
    for culprit in recovery.denied:
        denied.add_metric([culprit.plugin, culprit.slot, culprit.name], 1)
    yield denied
    build = GaugeMetricFamily("hardpoint_build_info", "The server's version.", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    if table is not None:
        labels = ["family", "of", "range", "chosen", "plugin"]
        chosen = GaugeMetricFamily(
            "hardpoint_selection_info", "The kernels that serve, by range of steps.", labels=labels
        )
        for row in {(r.family, r.of or "", r.range, r.chosen, r.plugin): None for r in table.rows}:
            chosen.add_metric(list(row), 1)
        yield chosen
