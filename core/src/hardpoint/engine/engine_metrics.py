"""An engine's metrics, under the names that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hardpoint.engine.client import EngineStats
from hardpoint.engine.requests import RequestProgress
from hardpoint.metrics import EngineMetrics
from hardpoint.plugin_host.record import CORE


class StepMetrics:
    """Metrics that are counted as steps are collected."""

    def __init__(self, metrics: EngineMetrics) -> None:
        core = metrics.for_plugin(CORE)
        self._seconds: Histogram = core.histogram("step_seconds", "Host time from one collected step to the next.")
        self._generated: Counter = core.counter("generated_tokens", "Tokens drawn for requests.")
        self._finished: Counter = core.counter("finished_requests", "Requests that ended.", ["reason"])

    def collected(self, seconds: float, num_generated: int) -> None:
        """Count one step."""
        self._seconds.observe(seconds)
        self._generated.inc(num_generated)

    def ended(self, request: RequestProgress) -> None:
        """Count a request that has ended."""
        assert request.finish_reason is not None
        self._finished.labels(request.finish_reason).inc()


class StatsCollector:
    """Metrics of EngineStats and of memory by tag, read when Prometheus scrapes."""

    def __init__(self, stats: EngineStats, held: Callable[[], Mapping[str, int]]) -> None:
        """``held`` returns the bytes that are held, by tag."""
        self._stats, self._held = stats, held

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield _counter("steps", "Steps that were run.", stats.num_steps)
        tokens = CounterMetricFamily(
            "hardpoint_computed_tokens", "Tokens that ran through the model, padding left out.", labels=["step"]
        )
        tokens.add_metric(["decode"], stats.decode_tokens + stats.drafted_tokens - stats.accepted_tokens)
        tokens.add_metric(["prefill"], stats.prefill_tokens)
        yield tokens
        yield _counter("cached_tokens", "Tokens of prompts found in the prefix cache.", stats.cached_tokens)
        yield _counter("drafted_tokens", "Drafts that steps verified.", stats.drafted_tokens)
        yield _counter("accepted_tokens", "Drafts that were right.", stats.accepted_tokens)
        yield _counter("preemptions", "Times that a request gave up its pages.", stats.num_preemptions)
        yield _gauge("running_requests", "Requests that hold a slot.", stats.num_running)
        yield _gauge("waiting_requests", "Requests that wait for a slot.", stats.num_waiting)
        yield _gauge("cache_pages", "Pages of the KV cache.", stats.num_pages)
        yield _gauge("free_cache_pages", "Pages that no request holds.", stats.num_free_pages)
        held = GaugeMetricFamily("hardpoint_memory_bytes", "Bytes held on the device, by use.", labels=["tag"])
        for tag, nbytes in self._held().items():
            held.add_metric([tag], nbytes)
        yield held


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"hardpoint_{name}", help, value)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hardpoint_{name}", help, value)
