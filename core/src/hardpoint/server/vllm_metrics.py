"""An engine's metrics under vLLM's names, so that dashboards made for vLLM show them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hardpoint.metrics import MetricsSnapshot

_LABEL = "model_name"


def as_vllm(engine: MetricsSnapshot, model: str) -> MetricsSnapshot:
    """The state of the engine that serves ``model``: requests, cache, prefixes and preemptions."""
    return MetricsSnapshot(tuple(_families(engine, model)))


def _families(engine: MetricsSnapshot, model: str) -> Iterator[Metric]:
    def total(name: str, **labels: str) -> float:
        return engine.total(f"hardpoint_{name}", **labels)

    pages = total("cache_pages")
    used = 1 - total("free_cache_pages") / pages if pages else 0.0
    cached = total("cached_tokens_total")
    yield _gauge("num_requests_running", "Requests that hold a slot.", total("running_requests"), model)
    yield _gauge("num_requests_waiting", "Requests that wait for a slot.", total("waiting_requests"), model)
    yield _gauge("kv_cache_usage_perc", "Pages of the KV cache in use; 1 is all.", used, model)
    queried = total("computed_tokens_total", step="prefill") + cached
    yield _counter("prefix_cache_queries", "Tokens of prompts that were looked up.", queried, model)
    yield _counter("prefix_cache_hits", "Tokens of prompts found in the prefix cache.", cached, model)
    yield _counter("num_preemptions", "Times that a request gave up its pages.", total("preemptions_total"), model)


def _gauge(name: str, help: str, value: float, model: str) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", help, labels=[_LABEL])
    family.add_metric([model], value)
    return family


def _counter(name: str, help: str, value: float, model: str) -> Metric:
    family = CounterMetricFamily(f"vllm:{name}", help, labels=[_LABEL])
    family.add_metric([model], value)
    return family
