"""A method that cannot be called as its interface says is one line, before anything calls it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from hardpoint import LLM
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from hardpoint.layers import PluggableLayer
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.plugin_host import discover
from hardpoint.plugin_host.signatures import layer_misfit, misfit, op_misfit
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import (
    All2All,
    AttentionBackend,
    CacheLayout,
    Communicator,
    ExpertsKernel,
    GraphEngine,
    LinearKernel,
    Platform,
    PluginLoadError,
    QuantizationMethod,
    SelectionError,
    ToolParser,
)
from tests.plugins.conftest import Installer
from tests.support.engines import SMALL

ROWS = "the interface is LinearKernel.rows(weights, ids)"


def kernel(**members: Any) -> type:
    """A subclass of a sound linear kernel with other members."""
    return type("Kernel", (PlainLinear,), members)


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator, as authors write them."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Compiled:
    """A callable whose signature Python cannot read."""

    __signature__ = "none"

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "rows",
    [
        lambda self, weights, ids: ids,
        lambda self, weights, ids=None: ids,
        lambda self, weights, ids, fast=False: ids,
        lambda self, weights, ids, *, fast=False: ids,
        lambda self, weights, *args, **kwargs: weights,
        lambda self, weights, ids, **options: ids,
        lambda this, weights, ids: ids,
        staticmethod(lambda weights, ids: ids),
        counted(lambda self, weights, ids: ids),
        Compiled(),
    ],
)
def test_a_method_may_take_more_and_be_anything_that_can_be_called(rows: Any) -> None:
    assert misfit(kernel(rows=rows)) is None


@pytest.mark.parametrize(
    ("members", "fact"),
    [
        ({"rows": lambda self, weights: weights}, f"rows(weights) has no parameter 'ids'; {ROWS}"),
        ({"rows": lambda self, w, ids: ids}, f"rows(w, ids) has no parameter 'weights'; {ROWS}"),
        ({"rows": lambda self, ids, weights: ids}, f"rows(ids, weights) has 'weights' in another place; {ROWS}"),
        ({"rows": lambda self, weights, *, ids: ids}, "takes 'ids' by name alone"),
        ({"rows": lambda self, weights, ids, /: ids}, "does not take 'weights' by name"),
        ({"rows": lambda self, weights, ids, scale: ids}, "requires 'scale', which nobody gives"),
        ({"rows": lambda self, weights, ids, *, scale: ids}, "requires 'scale', which nobody gives"),
        ({"rows": lambda self, *args: args}, "has no parameter 'weights'"),
        ({"rows": counted(lambda self, weights: weights)}, "has no parameter 'ids'"),
        ({"rows": staticmethod(lambda self, weights, ids: ids)}, "has 'weights' in another place"),
        ({"apply": property(lambda self: None)}, "apply is a property, and LinearKernel.apply is a method"),
        ({"supports": lambda cls, workload, device: []}, "supports must be a classmethod, as LinearKernel.supports is"),
        ({"supports": classmethod(lambda cls, workload: [])}, "supports(workload) has no parameter 'device'"),
        ({"__init__": lambda self, ctx: None}, "__init__(ctx) has no parameter 'workload'"),
        ({"prepack": lambda self: {}}, "prepack() has no parameter 'weights'"),
    ],
)
def test_a_method_that_its_callers_cannot_call(members: dict[str, Any], fact: str) -> None:
    found = misfit(kernel(**members))
    assert found is not None
    assert fact in found
    assert "\n" not in found


async def _later(self: object, call: object) -> None: ...


@pytest.mark.parametrize(
    ("base", "members", "fact"),
    [
        (LinearKernel, {}, "does not define apply"),
        (PlainLinear, {"apply": _later}, "apply is a coroutine, and LinearKernel.apply is not"),
        (
            PlainLinear,
            {"apply": lambda self, x, weights, bias: None},  # of API 0.2
            "apply(x, weights, bias) has no parameter 'call'; the interface is LinearKernel.apply(call)",
        ),
        (
            ReferenceAttention,
            {"forward": lambda self, q, k, v, cache, metadata, out: None},  # of API 0.2
            "forward(q, k, v, cache, metadata, out) has no parameter 'call'; the interface is "
            "AttentionBackend.forward(call)",
        ),
        (ReferenceAttention, {"plan": lambda self, batch, device: None}, "requires 'device', which nobody gives"),
        (
            ReferenceAttention,
            {"cache_spec": lambda self: None},
            "cache_spec is a method, and AttentionBackend.cache_spec",
        ),
        (ReferenceAttention, {}, None),
        (AttentionBackend, {}, "does not define forward, plan, store"),
        (ExpertsKernel, {"apply": lambda self, x: x}, "apply(x) has no parameter 'call'"),
        (All2All, {"dispatch": lambda self, x: x, "combine": lambda self, y, handle: y}, "has no parameter"),
        (Communicator, {"all_gather": lambda self, x: x}, "does not define abort, close, init"),
        (
            QuantizationMethod,
            {"__init__": lambda self: None, "scheme": lambda self, module: None},
            "has no parameter 'request'",
        ),
        (ToolParser, {"feed": lambda self: [], "finish": lambda self: []}, "feed() has no parameter 'delta'"),
        (GraphEngine, {"prepare": lambda self, key, fn: None}, "has no parameter 'inputs'"),
    ],
)
def test_every_interface_is_checked(base: type, members: dict[str, Any], fact: str | None) -> None:
    found = misfit(type("Own", (base,), members))
    assert (fact is None and found is None) or (found is not None and str(fact) in found)


def test_a_platform_and_the_layout_of_a_backend() -> None:
    class Laid(CacheLayout):
        def regions(self, spec: Any) -> Any:  # type: ignore[override]  # that is the fault
            return ()

        def to_logical(self, views: Any, pages: Any) -> Any:
            raise NotImplementedError

        def from_logical(self, views: Any, pages: Any, planes: Any) -> None: ...

    found = misfit(type("Own", (ReferenceAttention,), {"layout": Laid()}))
    assert found is not None
    assert found.startswith("layout: Laid: regions(spec) has no parameter 'block_size'")

    members = {"memory": property(lambda self: None), "synchronize": lambda self: None, "activate": lambda self: None}
    detect = classmethod(lambda cls: None)
    found = misfit(type("Own", (Platform,), {**members, "detect": detect}))
    assert found is not None
    assert "activate() has no parameter 'index'; the interface is Platform.activate(index)" in found


@pytest.mark.parametrize(
    ("form", "target", "fact"),
    [
        ("functional", lambda x, weight, *, eps: x, None),
        ("functional", lambda a, b, *, eps, fast=True: a, None),
        ("functional", lambda x, weight, eps: x, None),
        ("functional", lambda x, weight: x, "cannot be called as rms_norm(x, weight, *, eps): "),
        ("functional", lambda x, weight, *, epsilon: x, "cannot be called as rms_norm(x, weight, *, eps): "),
        ("functional", lambda x, weight, out, *, eps: x, "missing a required argument: 'out'"),
        ("out", lambda x, weight, out, *, eps: None, None),
        ("out", lambda x, weight, out, *, eps, tile: None, "cannot be called as rms_norm(x, weight, outputs, *, eps)"),
        ("out", lambda x, out, *, epsilon: None, "cannot be called as rms_norm(x, weight, outputs, *, eps)"),
        ("factory", lambda context, workload, parts: None, None),
        ("factory", lambda context, workload: None, "cannot be called as factory(context, workload, parts)"),
        ("functional", max, None),
    ],
)
def test_ops_are_held_to_the_reference_and_the_form(form: Any, target: Any, fact: str | None) -> None:
    found = op_misfit(target, rms_norm.reference, form)
    assert (fact is None and found is None) or (found is not None and str(fact) in found)


def test_what_a_reference_lets_one_leave_out_may_be_left_out() -> None:
    def reference(x: Any, bias: Any = None, *, scale: float, cap: float = 0.0) -> Any: ...

    assert op_misfit(lambda x, bias=None, *, scale, cap=1.0: x, reference, "functional") is None
    assert op_misfit(lambda x, bias, *, scale, cap=1.0: x, reference, "functional") is not None
    assert op_misfit(lambda x, bias=None, *, scale, cap: x, reference, "functional") is not None
    assert op_misfit(lambda x, bias, out, *, scale, cap=1.0: None, reference, "out") is None


def test_a_layer_is_built_and_called_in_place_of_the_one_it_replaces() -> None:
    class Declared(PluggableLayer):
        def __init__(self, ctx: Any, args: Any, tied_to: Any = None) -> None: ...
        def forward(self, x: Any, residual: Any = None) -> Any: ...

    class Narrow(PluggableLayer):
        def __init__(self, ctx: Any, args: Any, tied_to: Any = None) -> None: ...
        def forward(self, x: Any) -> Any: ...

    assert layer_misfit(Declared, Declared) is None
    found = layer_misfit(Narrow, Declared)
    assert found == ("forward(x) has no parameter 'residual'; the interface is Declared.forward(x, residual=None)")
    assert "has no parameter 'args'" in str(layer_misfit(type("Bare", (PluggableLayer,), {}), Declared))


def test_everything_in_tree_fits() -> None:
    plugins, faults = discover(), []
    offers = [offer for record in plugins.records for offer in plugins.offers_of(record)]
    for offer in offers:
        try:
            plugins.load(offer)
        except PluginLoadError as error:
            faults.append(str(error))
    absent = ("cannot be loaded", "is not installed")
    assert [fault for fault in faults if not any(words in fault for words in absent)] == []
    assert len(offers) - len(faults) > 150


# A plugin whose LinearKernel.apply lacks a parameter, really installed.

LINE = (
    "target 'hp_narrow.kernels:Narrow': apply(x, weights, bias) has no parameter 'call'; the interface is "
    "LinearKernel.apply(call)"
)


def test_an_automatic_choice_passes_over_it_with_a_warning(
    installed: Installer, caplog: pytest.LogCaptureFixture
) -> None:
    installed("narrow")
    with caplog.at_level(logging.WARNING):
        rows = explain(EngineConfig.create(**{"model": "demo", **SMALL})).rows
    assert "narrow" not in {row.chosen for row in rows if row.family == "linear"}
    warnings = [r.getMessage() for r in caplog.records if "passed over" in r.getMessage()]
    assert len(warnings) == 1, "one line, however many matrices there are"
    assert "plugin narrow (narrow-hardpoint 1.0): linear: narrow" in warnings[0]
    assert LINE in warnings[0]


def test_a_named_choice_is_an_error_of_one_line(installed: Installer) -> None:
    installed("narrow")
    with pytest.raises(SelectionError, match="narrow: it cannot serve linear") as caught:
        LLM(**SMALL, use=["linear=narrow"])
    assert LINE in str(caught.value)
    with pytest.raises(PluginLoadError) as refused:
        LLM(**SMALL, plugins=["cpu", "narrow"])
    assert LINE in str(refused.value)
    assert "\n" not in str(refused.value)


def test_doctor_and_conform_say_so(installed: Installer, capsys: pytest.CaptureFixture[str]) -> None:
    installed("narrow")
    assert run(["plugins", "doctor", "narrow", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["state"] == "broken"
    assert LINE in finding["note"]
    assert run(["conform", "narrow", "--platform", "cpu", "--in-process"]) != 0
    captured = capsys.readouterr()
    assert "has no parameter 'call'" in " ".join((captured.out + captured.err).split())
