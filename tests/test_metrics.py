"""Metrics: names, kinds, and engines and plugins that do not clash."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from hardpoint.metrics import EngineMetrics, PluginMetrics
from hardpoint_plugin_api import PluginError


def test_core_and_plugins_count_under_their_own_names() -> None:
    engine = EngineMetrics()
    for plugin, amount in (("core", 1), ("acme", 10), ("other", 100)):
        engine.for_plugin(plugin).counter("calls", "Calls.").inc(amount)
    engine.for_plugin("acme").counter("calls", "Calls.").inc()
    snapshot = engine.snapshot()
    assert snapshot.value("hardpoint_calls_total") == 1
    assert snapshot.value("hardpoint_acme_calls_total") == 11
    assert snapshot.value("hardpoint_other_calls_total") == 100


def test_two_engines_count_apart() -> None:
    one, two = EngineMetrics(), EngineMetrics()
    one.for_plugin("acme").counter("calls", "Calls.").inc(3)
    two.for_plugin("acme").counter("calls", "Calls.").inc()
    assert [engine.snapshot().value("hardpoint_acme_calls_total") for engine in (one, two)] == [3, 1]


def test_every_kind_with_labels() -> None:
    engine = EngineMetrics()
    acme = engine.for_plugin("acme")
    calls = acme.counter("calls", "Calls.", ["kernel", "dtype"])
    calls.labels("paged", "float32").inc(2)
    calls.labels(kernel="paged", dtype="float16").inc()
    acme.gauge("depth", "Depth.", ["queue"]).labels("a").set(-2)
    acme.gauge("level", "Level.").set_function(lambda: 7)
    tiles = acme.histogram("tiles", "Tiles.", buckets=[1, 8])
    for amount in (1, 5, 9):
        tiles.observe(amount)
    with acme.histogram("plan_seconds", "Planning.").time():
        pass
    found = engine.snapshot()
    assert found.value("hardpoint_acme_calls_total", kernel="paged", dtype="float32") == 2
    assert found.value("hardpoint_acme_calls_total", kernel="paged", dtype="float16") == 1
    assert found.value("hardpoint_acme_depth", queue="a") == -2
    assert found.value("hardpoint_acme_level") == 7
    assert [found.value("hardpoint_acme_tiles_bucket", le=le) for le in ("1.0", "8.0", "+Inf")] == [1, 2, 3]
    assert found.value("hardpoint_acme_tiles_sum") == 15
    assert found.value("hardpoint_acme_plan_seconds_count") == 1


def test_a_snapshot_is_plain_data_and_prometheus_text() -> None:
    engine = EngineMetrics()
    calls = engine.for_plugin("acme").counter("calls", "Calls of\nkernels.", ["kernel"])
    calls.labels('a "quoted" one').inc()
    snapshot = pickle.loads(pickle.dumps(engine.snapshot()))
    calls.labels('a "quoted" one').inc()
    assert snapshot.value("hardpoint_acme_calls_total", kernel='a "quoted" one') == 1
    assert snapshot.to_prometheus().splitlines() == [
        r"# HELP hardpoint_acme_calls_total Calls of\nkernels.",
        "# TYPE hardpoint_acme_calls_total counter",
        r'hardpoint_acme_calls_total{kernel="a \"quoted\" one"} 1.0',
    ]
    with pytest.raises(KeyError, match=r"no sample 'hardpoint_acme_cals_total'.*there are hardpoint_acme_calls_total"):
        snapshot.value("hardpoint_acme_cals_total")


@pytest.mark.parametrize(
    ("declare", "fact"),
    [
        (lambda m: m.counter("Calls", ""), "metric 'Calls': a name is lower-case letters"),
        (lambda m: m.gauge("calls-now", ""), "metric 'calls-now': a name is lower-case letters"),
        (lambda m: m.gauge("", ""), "metric ''"),
        (lambda m: m.gauge("two__scores", ""), "single underscores"),
        (lambda m: m.counter("calls_total", ""), "Prometheus itself adds '_total'; declare 'calls'"),
        (lambda m: m.gauge("calls_sum", ""), "adds '_sum'"),
        (lambda m: m.counter("calls", "", ["Kernel"]), "a label is lower-case letters.*got 'Kernel'"),
        (lambda m: m.histogram("calls", "", ["le"]), "none of le, pipeline_stage, quantile; got 'le'"),
        (lambda m: m.histogram("calls", "", buckets=[2, 1]), r"ascending, got \[2, 1\]"),
        (lambda m: m.histogram("calls", "", buckets=[]), r"ascending, got \[\]"),
    ],
)
def test_names_that_are_none(declare: Callable[[PluginMetrics], object], fact: str) -> None:
    engine = EngineMetrics()
    with pytest.raises(PluginError, match=fact) as caught:
        declare(engine.for_plugin("acme"))
    assert "plugin acme: metric" in str(caught.value)
    assert engine.snapshot().families == ()


def test_one_name_is_one_metric() -> None:
    engine = EngineMetrics()
    engine.for_plugin("acme").counter("calls", "Calls.", ["kernel"])
    clashes: list[Callable[[], object]] = [
        lambda: engine.for_plugin("acme").gauge("calls", "Calls.", ["kernel"]),
        lambda: engine.for_plugin("acme").counter("calls", "Calls."),
        lambda: engine.for_plugin("core").counter("acme_calls", "Calls.", ["kernel"]),
    ]
    for clash in clashes:
        message = "plugin acme has declared hardpoint_acme_calls as a counter labelled kernel; give one of them another"
        with pytest.raises(PluginError, match=message):
            clash()
