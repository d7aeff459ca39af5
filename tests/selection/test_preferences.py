"""Priorities that depend on the step, the workload or the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hardpoint.context import load_target
from hardpoint.plugin_host import Offer
from hardpoint.selection import Selector, Settings
from hardpoint_plugin_api import (
    CheckContext,
    Feature,
    Preference,
    Reason,
    Requirement,
    TokensRequirement,
)
from hardpoint_plugin_api.requirements import FeatureRequirement
from tests.selection.fakes import MATMUL, TOY, VETO, Answers, FakePlugins, offer, reasons, select, selector, served


class Never(Requirement):
    def check(self, context: CheckContext) -> Reason | None:
        return Reason("never", "it never holds")


FEW, MANY = TokensRequirement(max=8), TokensRequirement(min=100)
LIBRARY = offer("library", priority=50)


def kernel(*preferred: Preference, priority: int = 10, layout: str = "plain") -> Offer:
    return offer("kernel", priority=priority, preferred=preferred, layout=layout)


def test_a_kernel_comes_first_in_some_steps_only() -> None:
    assert served(select(kernel(Preference(60, (FEW,))), LIBRARY)) == [("1-8", "kernel"), ("9+", "library")]
    both = kernel(Preference(60, (FEW,)), Preference(60, (MANY,)))
    assert served(select(both, LIBRARY)) == [("1-8", "kernel"), ("9-99", "library"), ("100+", "kernel")]
    assert served(select(both)) == [("any", "kernel")]


def test_it_comes_last_in_some() -> None:
    assert served(select(kernel(Preference(-1, (FEW,)), priority=60), LIBRARY)) == [
        ("1-8", "library"),
        ("9+", "kernel"),
    ]


def test_the_first_preference_that_holds_counts() -> None:
    ordered = kernel(Preference(60, (FEW,)), Preference(40, (TokensRequirement(max=16),)), priority=70)
    assert served(select(ordered, LIBRARY)) == [("1-8", "kernel"), ("9-16", "library"), ("17+", "kernel")]
    never = kernel(Preference(60, (FEW, Never())))
    assert served(select(never, LIBRARY)) == [("any", "library")]


def test_preferences_serve_nothing_that_is_excluded() -> None:
    small = offer("small", tokens=TokensRequirement(max=4), preferred=(Preference(99, (FEW,)),))
    assert served(select(small, LIBRARY)) == [("1-4", "small"), ("5+", "library")]


def test_the_layout_follows_the_highest_priority() -> None:
    tiled = kernel(Preference(60, (FEW,)), layout="tiled")
    plan = select(tiled, LIBRARY)
    assert served(plan) == [("any", "kernel")]
    assert reasons(plan) == {"library": ["layout"]}


def test_losers_of_another_layout_are_told_the_highest_priority() -> None:
    few_tiled, few_plain = (
        offer(name, priority=10, preferred=(Preference(priority, (FEW,)),), layout=layout)
        for name, priority, layout in (("kernel", 60, "tiled"), ("near", 55, "plain"))
    )
    (rejection,) = select(few_tiled, few_plain).rejected
    assert str(rejection.reasons[0]) == (
        "kernel comes before it, and all winners of a plan must have one layout "
        "(wanted layout tiled, or priority above 60, supported layout plain, priority 55)"
    )


def test_where_a_winner_is_refused_the_next_is_chosen_by_its_preferences() -> None:
    """Whether the user denies the winner, or the winner itself does not support the workload."""
    offers = [kernel(Preference(60, (FEW,))), LIBRARY, best := offer("best", priority=99)]
    expected = [("1-8", "kernel"), ("9+", "library")]
    assert served(select(*offers)) == [("any", "best")]
    denied = Reason("denied", "the user denies it")
    plugins = FakePlugins(offers)
    denying = Selector(
        plugins,
        TOY,
        Settings({}, ("all",)),
        load=partial(load_target, plugins),
        refuses=lambda o: denied if o == best else None,
    )
    assert served(denying.select(MATMUL)) == expected
    assert served(selector(FakePlugins(offers, {"best": Answers([VETO])})).select(MATMUL)) == expected


def test_losers_are_told_the_priority_of_those_steps() -> None:
    ahead = kernel(Preference(60, (FEW,)), priority=55)
    (rejection,) = select(ahead, LIBRARY).rejected
    assert str(rejection.reasons[0]) == "kernel comes before it (wanted priority above 55, supported priority 50)"


def test_whoever_serves_all_steps_alike_prefers_none() -> None:
    """Batch invariance: a preference for some steps would part them."""
    invariant = replace(MATMUL, features=frozenset({Feature.BATCH_INVARIANT}))
    claims = FeatureRequirement((Feature.BATCH_INVARIANT,))
    offers = [
        offer("kernel", priority=10, requires=(claims,), preferred=(Preference(60, (FEW,)),)),
        offer("library", priority=50, requires=(claims,)),
    ]
    assert served(select(*offers, workload=invariant)) == [("any", "library")]
