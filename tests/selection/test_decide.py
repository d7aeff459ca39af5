"""Decisions by measurements: margins, the one layout that all share, ranges, noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from hardpoint.plugin_host import Offer
from hardpoint.selection import Plan, TuningFile, Verdict
from hardpoint.selection.decide import Contender, Decision, Form, Times, decide, verdicts, within_noise
from hardpoint_plugin_api import Feature, Preference, QuantSpec, Scale, TokensRequirement
from hardpoint_plugin_api.requirements import FeatureRequirement
from tests.selection.fakes import MATMUL, TOY, FakePlugins, offer, select, selector, served

ANY = offer("any")
GEMV = offer("gemv", priority=9, tokens=TokensRequirement(max=8))
BEST = offer("best", priority=5)
TILED = offer("tiled", layout="tiled", priority=-5)
TILED_GEMV = offer("tiled_gemv", layout="tiled", priority=-6, tokens=TokensRequirement(max=8))
PRIORITY = partial(selector(FakePlugins(())).priority, MATMUL)
ROUNDED = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)


def times(seconds: Mapping[Offer | Contender, Mapping[int, float]]) -> Times:
    """By number of tokens, of what is given by contender."""
    found: dict[int, dict[Contender, float]] = {}
    for who, measured in seconds.items():
        for tokens, value in measured.items():
            found.setdefault(tokens, {})[who if isinstance(who, Contender) else Contender(who)] = value
    return dict(sorted(found.items()))


def winners(decision: Decision) -> dict[int, str]:
    return {tokens: contender.name for tokens, contender in decision.winners.items()}


def follow(plan: Plan, *offers: Offer, found: tuple[Verdict, ...]) -> list[tuple[str, str]]:
    """The winners when the selector reads these verdicts."""
    key = (TOY.name, "linear", None, plan.workload.key())
    return served(selector(FakePlugins(offers), tuning=TuningFile({key: found})).select(plan.workload))


def test_who_is_faster_by_the_margin_serves_from_there_on() -> None:
    offers = (ANY, GEMV, BEST)
    plan = select(*offers)
    assert served(plan) == [("1-8", "gemv"), ("9+", "best")]
    measured = times(
        {
            GEMV: {1: 1.0, 8: 3.0},
            BEST: {1: 2.0, 8: 2.8, 16: 2.9, 64: 5.0},
            ANY: {1: 0.96, 8: 9.0, 16: 2.0, 64: 4.5},
        }
    )
    decision = decide(measured, plan, (1, 8), 0.05, PRIORITY)
    assert winners(decision) == {1: "gemv", 8: "best", 16: "any", 64: "any"}, "4 % less is no reason"
    found = verdicts(decision, measured, {"torch": "2.13"}, {"threads": "4"})
    assert [(v.name, v.tokens.min, v.tokens.max) for v in found] == [("gemv", 1, 1), ("best", 2, 8), ("any", 9, None)]
    assert {frozenset(v.versions.items()) for v in found} == {frozenset({("torch", "2.13")})}
    assert found[2].measured == {16: {"best": 2.9e6, "any": 2e6}, 64: {"best": 5e6, "any": 4.5e6}}
    assert follow(plan, *offers, found=found) == [("1-1", "gemv"), ("2-8", "best"), ("9+", "any")]


def test_a_winner_serves_no_steps_that_it_is_not_for() -> None:
    """Between 8 and 64 the larger one's winner is meant to serve; past its end, priority decides."""
    middle = offer("middle", priority=-1, tokens=TokensRequirement(min=32, max=100))
    plan = select(ANY, middle)
    measured = times({ANY: {8: 1.0, 64: 5.0}, middle: {64: 1.0}})
    found = verdicts(decide(measured, plan, (8,), 0.05, PRIORITY), measured, {}, {})
    assert [(v.name, v.tokens.min, v.tokens.max) for v in found] == [("any", 1, 8), ("middle", 9, None)]
    assert follow(plan, ANY, middle, found=found) == [("1-31", "any"), ("32-100", "middle"), ("101+", "any")]


def test_the_layout_is_that_of_the_best_mean() -> None:
    offers = (BEST, TILED, TILED_GEMV)
    plan = select(*offers)
    measured = times(
        {
            BEST: {1: 4.0, 64: 1.0, 512: 1.0},
            TILED: {1: 6.0, 64: 1.0, 512: 4.0},
            TILED_GEMV: {1: 1.0},
        }
    )
    few = decide(measured, plan, (1, 64), 0.05, PRIORITY)
    assert few.form == Form("tiled")
    assert winners(few) == {1: "tiled_gemv", 64: "tiled", 512: "tiled"}, "all share it, even where another is faster"
    assert few.seconds == pytest.approx({Form("plain"): 2.0, Form("tiled"): 1.0})
    found = verdicts(few, measured, {}, {})
    assert follow(plan, *offers, found=found) == [("1-1", "tiled_gemv"), ("2+", "tiled")]
    assert decide(measured, plan, (512,), 0.05, PRIORITY).form == Form("plain")
    assert decide(measured, plan, (64,), 0.05, PRIORITY).form == Form("plain"), (
        "what serves now stays where nothing is gained"
    )
    assert decide(measured, plan, (1, 64), 0.05, PRIORITY, {"tiled"}).form == Form("plain")
    tiled_now = select(*offers, tuned="tiled")
    assert decide(measured, tiled_now, (64,), 0.05, PRIORITY, {"tiled"}).form == Form("tiled")


def test_a_layout_that_leaves_steps_unserved_is_none() -> None:
    measured = times({BEST: {1: 4.0, 64: 1.0}, TILED_GEMV: {1: 1.0}})
    decision = decide(measured, select(BEST, TILED_GEMV), (1,), 0.05, PRIORITY)
    assert (decision.form, winners(decision)) == (Form("plain"), {1: "best", 64: "best"})
    assert set(decision.seconds) == {Form("plain")}


def test_another_layout_is_judged_from_what_it_prefers() -> None:
    """Nothing of it serves now: the candidate whose preference holds for so many tokens is the one to beat."""
    few = Preference(20, (TokensRequirement(max=8),))
    preferring = offer("tiled_few", layout="tiled", priority=-9, preferred=(few,))
    plan = select(BEST, choice="best")
    measured = times({BEST: {1: 9.0, 64: 9.0}, TILED: {1: 0.97, 64: 0.97}, preferring: {1: 1.0, 64: 1.0}})
    decision = decide(measured, plan, (1, 64), 0.05, PRIORITY)
    assert winners(decision) == {1: "tiled_few", 64: "tiled"}, "3 % less is no reason"


def test_inputs_come_rounded_where_all_take_them_so() -> None:
    """A kernel that rounds its inputs is faster with rounded inputs, but not where another winner cannot take them."""
    offers = (GEMV, BEST, ANY)
    plan = select(*offers)
    rounded: dict[Offer | Contender, dict[int, float]] = {
        Contender(GEMV, ROUNDED): {1: 1.0},
        Contender(BEST, ROUNDED): {1: 2.0, 64: 2.0},
    }
    plain: dict[Offer | Contender, dict[int, float]] = {
        GEMV: {1: 3.0},
        BEST: {1: 4.0, 64: 4.0},
        ANY: {1: 9.0, 64: 1.8},
    }
    decision = decide(times({**plain, **rounded}), plan, (1, 64), 0.05, PRIORITY)
    assert decision.form == Form("plain", ROUNDED)
    assert winners(decision) == {1: "gemv", 64: "best"}
    found = verdicts(decision, times({**plain, **rounded}), {}, {})
    assert found[1].measured == {64: {"best": 2e6, "any": 1.8e6}}
    plain[ANY] = {1: 9.0, 64: 0.1}
    decision = decide(times({**plain, **rounded}), plan, (1, 64), 0.05, PRIORITY)
    assert (decision.form, winners(decision)) == (Form("plain"), {1: "gemv", 64: "any"})


def test_one_implementation_serves_all_where_batches_must_not_matter() -> None:
    claim = (FeatureRequirement((Feature.BATCH_INVARIANT,)),)
    first, second = offer("first", priority=9, requires=claim), offer("second", requires=claim)
    plan = select(first, second, workload=replace(MATMUL, features=frozenset({Feature.BATCH_INVARIANT})))
    measured = times({first: {1: 1.0, 64: 8.0}, second: {1: 2.0, 64: 1.0}})
    for decisive, winner in (((1,), "first"), ((1, 64), "second")):
        decision = decide(measured, plan, decisive, 0.05, PRIORITY)
        assert winners(decision) == {1: winner, 64: winner}
        (verdict,) = verdicts(decision, measured, {}, {})
        assert verdict.tokens == TokensRequirement()
        assert follow(plan, first, second, found=(verdict,)) == [("any", winner)]


def test_what_was_decided_before_stays_within_the_margin() -> None:
    """Repeated, with the last decision as what serves now: noise on both sides of a margin flips nothing."""
    offers = (ANY, BEST)
    near = times({ANY: {1: 0.94}, BEST: {1: 1.0}})
    found = verdicts(decide(near, select(*offers), (1,), 0.05, PRIORITY), near, {}, {})
    assert [v.name for v in found] == ["any"]
    now = select(*offers, tuned=found)
    again = times({ANY: {1: 0.97}, BEST: {1: 1.0}})
    repeated = verdicts(decide(again, now, (1,), 0.05, PRIORITY), again, {}, {})
    assert [v.name for v in repeated] == ["any"]
    assert within_noise(found, repeated, 0.05)
    assert not within_noise(found, repeated, 0.01)
    assert not within_noise((), repeated, 0.05)
    assert not within_noise(found, (replace(repeated[0], versions={"torch": "3"}),), 0.05)
    assert not within_noise(found, (replace(repeated[0], measured={}),), 0.05)
