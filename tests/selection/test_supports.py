"""Answers of targets after import: asked of winners only, believed, and survived when broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardpoint_plugin_api import PluginLoadError, Reason, SelectionError, TokensRequirement
from hardpoint_plugin_api.requirements import OneOfRequirement
from tests.selection.fakes import MATMUL, TOY, VETO, Answers, FakePlugins, offer, reasons, selector, served

BEST, SECOND, THIRD = offer("best", priority=9), offer("second", priority=5), offer("third", priority=1)
MUST_NOT_LOAD = RuntimeError("a loser was loaded")


def test_losers_are_never_loaded() -> None:
    offers = [
        BEST,
        SECOND,
        offer("elsewhere", priority=99, platforms=("other",)),
        offer("unfit", priority=99, requires=(OneOfRequirement("dtype", ("int4",)),)),
        offer("other_layout", priority=8, layout="tiled"),
        offer("replaced", priority=99),
        offer("heir", replaces="replaced"),
    ]
    plugins = FakePlugins(offers, {"best": (best := Answers([])), "second": (second := Answers([]))})
    assert served(selector(plugins).select(MATMUL)) == [("any", "best")]
    assert plugins.loaded == ["best"]
    assert best.asked == [(MATMUL, TOY)]
    assert not second.asked


def test_the_chosen_one_alone_is_loaded() -> None:
    plugins = FakePlugins([BEST, SECOND, THIRD], {"best": MUST_NOT_LOAD, "second": MUST_NOT_LOAD})
    assert served(selector(plugins, {"linear": "third"}).select(MATMUL)) == [("any", "third")]
    assert plugins.loaded == ["third"]


def test_a_refusal_by_data_loads_nothing() -> None:
    plugins = FakePlugins([BEST, offer("far", platforms=("other",))])
    with pytest.raises(SelectionError):
        selector(plugins, {"linear": "far"}).select(MATMUL)
    assert not plugins.loaded


def test_every_winner_is_asked_once() -> None:
    small = offer("small", priority=20, tokens=TokensRequirement(max=8, phase="decode"))
    answers = {name: Answers([]) for name in ("small", "best")}
    plugins = FakePlugins([BEST, small], answers)
    assert len(selector(plugins).select(MATMUL).entries) == 3
    assert [len(a.asked) for a in answers.values()] == [1, 1]


def test_vetoes_pass_on_to_the_next_with_every_reason() -> None:
    second_reason = Reason("toy-size", "too wide", wanted="4096", supported="1024")
    plugins = FakePlugins([BEST, SECOND, THIRD], {"best": Answers([VETO, second_reason]), "second": Answers([VETO])})
    plan = selector(plugins).select(MATMUL)
    assert served(plan) == [("any", "third")]
    assert reasons(plan) == {"best": ["toy-veto", "toy-size"], "second": ["toy-veto"]}
    assert plugins.loaded == ["best", "second", "third"]


def test_a_veto_in_one_range_moves_that_range_alone() -> None:
    small = offer("small", priority=20, tokens=TokensRequirement(max=8))
    plan = selector(FakePlugins([BEST, SECOND, small], {"best": Answers([VETO])})).select(MATMUL)
    assert served(plan) == [("1-8", "small"), ("9+", "second")]
    plan = selector(FakePlugins([BEST, SECOND, small], {"small": Answers([VETO])})).select(MATMUL)
    assert served(plan) == [("any", "best")]


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (ZeroDivisionError("by nought"), "raised ZeroDivisionError: by nought"),
        (None, "must return a list of Reason from supports(), got None"),
        (True, "must return a list of Reason from supports(), got True"),
        ("no", "must return a list of Reason from supports(), got 'no'"),
        (["no"], "must return a list of Reason from supports(), got ['no']"),
        ((VETO,), "must return a list of Reason from supports(), got (Reason("),
    ],
)
def test_broken_supports(answer: object, fact: str) -> None:
    plugins = FakePlugins([BEST, SECOND], {"best": Answers(answer)})
    plan = selector(plugins).select(MATMUL)
    assert served(plan) == [("any", "second")]
    assert reasons(plan) == {"best": ["supports-failed"]}
    assert fact in str(plan.rejected[0].reasons[0])
    with pytest.raises(SelectionError) as caught:
        selector(plugins, {"linear": "best"}).select(MATMUL)
    assert fact in str(caught.value)
    assert "Can serve: second." in str(caught.value)


def test_supports_that_is_no_function() -> None:
    class Odd:
        supports = "everything"

    plan = selector(FakePlugins([BEST, SECOND], {"best": Odd})).select(MATMUL)
    assert reasons(plan) == {"best": ["supports-failed"]}


def test_a_target_that_cannot_be_loaded() -> None:
    plugins = FakePlugins([BEST, SECOND], {"best": ImportError("libtoy.so.2 is missing")})
    plan = selector(plugins).select(MATMUL)
    assert served(plan) == [("any", "second")]
    (reason,) = plan.rejected[0].reasons
    assert reason.code == "load-failed"
    assert "libtoy.so.2 is missing" in str(reason)
    with pytest.raises(SelectionError, match=r"libtoy\.so\.2 is missing") as caught:
        selector(plugins, {"linear": "best"}).select(MATMUL)
    assert [r.code for r in caught.value.rejected["best"]] == ["load-failed"]


def test_what_is_passed_over_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    plugins = FakePlugins([BEST, SECOND], {"best": ImportError("libtoy.so.2 is missing")})
    chooser = selector(plugins)
    chooser.select(MATMUL)
    chooser.select(replace(MATMUL, in_features=3072))
    (record,) = caplog.records
    assert (record.levelname, "passed over: plugin acme: libtoy.so.2 is missing" in record.message) == ("WARNING", True)


@pytest.mark.parametrize("broken", [ImportError("libtoy.so.2 is missing"), Answers(None)])
def test_a_plugin_that_was_asked_for_is_not_passed_over(broken: object) -> None:
    plugins = FakePlugins([BEST, SECOND], {"best": broken})
    with pytest.raises(PluginLoadError, match=r"libtoy|must return a list of Reason"):
        selector(plugins, asked=["acme"]).select(MATMUL)


def test_a_veto_of_what_was_asked_for_is_an_error() -> None:
    plugins = FakePlugins([BEST, SECOND], {"second": Answers([VETO])})
    with pytest.raises(SelectionError, match="second: not on a Tuesday") as caught:
        selector(plugins, {"linear": "second"}).select(MATMUL)
    assert "Can serve: best." in str(caught.value)
    assert list(caught.value.rejected) == ["second"]


def test_vetoes_of_others_do_not_hurt_what_was_asked_for() -> None:
    small = offer("small", tokens=TokensRequirement(max=8))
    plugins = FakePlugins([BEST, SECOND, small], {"best": Answers([VETO])})
    assert served(selector(plugins, {"linear": "small"}).select(MATMUL)) == [("1-8", "small"), ("9+", "second")]
