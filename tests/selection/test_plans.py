"""Plans whose winner depends on the step, the one layout they share, and generated adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.ops.base import by_tokens
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.selection import Plan, SelectionTable, StepRange, Verdict
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionWorkload,
    DeviceInfo,
    Feature,
    Reason,
    SelectionError,
    TokensRequirement,
    UnknownNameError,
)
from hardpoint_plugin_api.requirements import FeatureRequirement, HeadMultipleRequirement, OneOfRequirement
from tests.selection.fakes import MATMUL, TOY, VETO, Answers, FakePlugins, offer, reasons, select, selector, served

ANY = offer("any")
GEMV = offer("gemv", priority=9, tokens=TokensRequirement(max=8))
MIDDLE = offer("middle", priority=5, tokens=TokensRequirement(min=5, max=64))
HUGE = offer("huge", priority=7, tokens=TokensRequirement(min=1000))


def test_ranges_are_cut_where_winners_change() -> None:
    plan = select(ANY, GEMV, MIDDLE, HUGE)
    assert served(plan) == [("1-8", "gemv"), ("9-64", "middle"), ("65-999", "any"), ("1000+", "huge")]
    assert not plan.rejected


def test_a_name_on_several_platforms_is_the_one_of_this_platform() -> None:
    here, there = (offer("alike", platforms=(name,), plugin=name) for name in ("toy", "other"))
    for offers in ((here, there, ANY), (there, here, ANY)):
        for plan in (select(*offers, choice="alike"), select(*offers)):
            assert [e.offer.plugin for e in plan.entries] == ["toy"]
            assert {r.offer.plugin for r in plan.rejected} == {"acme"}
    with pytest.raises(SelectionError, match="another platform"):
        select(there, ANY, choice="alike")


def test_one_comparison_finds_the_winner() -> None:
    plan = select(ANY, GEMV, MIDDLE, HUGE)
    names = [e.offer.contribution.name for e in plan.entries]
    find = by_tokens([e.range.max for e in plan.entries], [lambda x, n=n: n for n in names])
    sizes = (1, 8, 9, 64, 65, 999, 1000, 5000)
    found = [find(torch.empty(size, 0)) for size in sizes]
    assert found == ["gemv", "gemv", "middle", "middle", "any", "any", "huge", "huge"]


def test_adjacent_ranges_of_one_winner_are_one() -> None:
    best = offer("best", priority=99)
    plan = select(best, ANY, GEMV, MIDDLE, HUGE)
    assert served(plan) == [("any", "best")]
    assert plan.offer == best
    split = select(offer("wide", priority=99, tokens=TokensRequirement(min=3)), ANY, GEMV, MIDDLE)
    assert served(split) == [("1-2", "gemv"), ("3+", "wide")]


def test_a_loser_is_told_which_winner_to_beat() -> None:
    """It could win where a weaker one does, not where the first row's winner does."""
    late = offer("late", priority=-1, tokens=TokensRequirement(min=70, max=80))
    plan = select(ANY, GEMV, MIDDLE, late)
    assert served(plan) == [("1-8", "gemv"), ("9-64", "middle"), ("65+", "any")]
    (rejection,) = plan.rejected
    assert str(rejection.reasons[0]) == "any comes before it (wanted priority above 0, supported priority -1)"
    wide = offer("wide", priority=1, tokens=TokensRequirement(max=64))
    (rejection,) = select(ANY, GEMV, MIDDLE, wide).rejected
    assert str(rejection.reasons[0]) == "middle comes before it (wanted priority above 5, supported priority 1)"


def test_a_loser_to_a_measurement_is_told_so() -> None:
    late = offer("late", priority=99, tokens=TokensRequirement(min=70))
    plan = select(ANY, GEMV, offer("measured", tokens=TokensRequirement(min=9)), late, tuned="measured")
    assert served(plan) == [("1-8", "gemv"), ("9+", "measured")]
    messages = {r.offer.contribution.name: str(r.reasons[0]) for r in plan.rejected}
    assert messages["late"] == "measured was measured: the tuning file names it"
    assert messages["any"] == "gemv comes before it (wanted priority above 9, supported priority 0)"


DECODE = offer("decode", priority=5, tokens=TokensRequirement(phase="decode"))
PREFILL = offer("prefill", priority=5, tokens=TokensRequirement(phase="prefill"))
SMALL_DECODE = offer("small_decode", priority=6, tokens=TokensRequirement(max=16, phase="decode"))


def test_phases_have_winners_of_their_own() -> None:
    assert served(select(DECODE, PREFILL)) == [("any prefill", "prefill"), ("any decode", "decode")]
    assert served(select(ANY, DECODE)) == [("any prefill", "any"), ("any decode", "decode")]
    assert served(select(ANY, SMALL_DECODE)) == [
        ("any prefill", "any"),
        ("1-16 decode", "small_decode"),
        ("17+ decode", "any"),
    ]


def test_phases_that_go_alike_are_one_row() -> None:
    """A loser for one phase must not change how the same answer is written: the digest rests on it."""
    loser = offer("loser", priority=-1, tokens=TokensRequirement(phase="decode"))
    assert served(select(ANY, GEMV, loser)) == served(select(ANY, GEMV)) == [("1-8", "gemv"), ("9+", "any")]
    assert served(select(ANY, loser)) == [("any", "any")]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (StepRange(), "any"),
        (StepRange(5), "5+"),
        (StepRange(1, 8), "1-8"),
        (StepRange(9, 9, "decode"), "9-9 decode"),
        (StepRange(phase="prefill"), "any prefill"),
    ],
)
def test_ranges_as_text(where: StepRange, text: str) -> None:
    assert str(where) == text


def test_what_nobody_serves_is_an_error_with_reasons() -> None:
    with pytest.raises(SelectionError) as caught:
        select(GEMV, MIDDLE, DECODE)
    codes = {name: [r.code for r in found] for name, found in caught.value.rejected.items()}
    assert codes == {"gemv": ["tokens"], "middle": ["tokens"], "decode": ["tokens"]}
    assert "(wanted any, supported 5-64)" in str(caught.value)
    assert "(wanted any, supported any decode)" in str(caught.value)


def test_a_chosen_one_serves_its_range_and_others_the_rest() -> None:
    plan = select(ANY, GEMV, offer("best", priority=99), choice="gemv")
    assert served(plan) == [("1-8", "gemv"), ("9+", "best")]
    assert [e.rule for e in plan.entries] == ["flag", "priority"]
    assert reasons(plan) == {"any": ["not-asked-for"]}


def test_measured_and_ranged() -> None:
    plan = select(ANY, GEMV, offer("best", priority=99), tuned="gemv")
    assert served(plan) == [("1-8", "gemv"), ("9+", "best")]
    assert [e.rule for e in plan.entries] == ["tuning file", "priority"]


def test_measured_by_ranges_and_why() -> None:
    """A verdict holds where it was measured; beside it stands what it was measured against."""
    few = Verdict("any", TokensRequirement(max=2), {1: {"any": 3.21, "gemv": 4.0}, 2: {"any": 3.0, "gemv": 5.0}})
    many = Verdict("middle", TokensRequirement(min=20), {64: {"middle": 1234.5, "any": 2000.0}})
    plan = select(ANY, GEMV, MIDDLE, HUGE, tuned=[few, many])
    assert served(plan) == [("1-2", "any"), ("3-8", "gemv"), ("9-64", "middle"), ("65-999", "any"), ("1000+", "huge")]
    rows = SelectionTable([plan]).rows
    assert [(row.rule, row.measured) for row in rows] == [
        ("tuning file", "3.2 us at 1 token, next best gemv 4.0 us"),
        ("priority", None),
        ("priority", None),
        ("priority", None),
        ("priority", None),
    ]
    plan = select(ANY, GEMV, offer("slow", priority=99), tuned=[Verdict("any", measured={4: {"any": 5, "slow": 7.5}})])
    assert served(plan) == [("any", "any")]
    assert {r.offer.contribution.name: str(r.reasons[0]) for r in plan.rejected} == {
        "slow": "any was measured: 5.0 us at 4 tokens, this 7.5 us; the tuning file names it",
        "gemv": "any was measured: the tuning file names it",
    }


def test_what_was_measured_in_any_steps_sets_the_layout() -> None:
    verdict = Verdict("tiled_gemv", TokensRequirement(max=4), {1: {"tiled_gemv": 2.0, "plain_best": 120.0}})
    best = offer("plain_best", priority=99)
    plan = select(TILED, TILED_GEMV, best, ANY, tuned=[verdict])
    assert served(plan) == [("1-8", "tiled_gemv"), ("9+", "tiled")]
    against = {r.offer.contribution.name: r.reasons[0] for r in plan.rejected}
    assert against["plain_best"].message.startswith("tiled_gemv was measured: 2.0 us at 1 token, this 120 us; ")
    assert (against["any"].wanted, against["any"].supported) == ("layout tiled", "layout plain")


def test_one_implementation_for_all_steps_is_never_replaced_in_some() -> None:
    features = (FeatureRequirement((Feature.BATCH_INVARIANT,)),)
    offers = [offer("high", priority=9, requires=features), offer("low", requires=features)]
    workload = replace(MATMUL, features=frozenset({Feature.BATCH_INVARIANT}))
    assert served(select(*offers, workload=workload, tuned=[Verdict("low", TokensRequirement(max=8))])) == [
        ("any", "high")
    ]
    assert served(select(*offers, workload=workload, tuned="low")) == [("any", "low")]


def test_all_that_could_serve_are_candidates() -> None:
    far, heir = offer("far", platforms=("other",)), offer("heir", replaces="tiled")
    plugins = FakePlugins([ANY, GEMV, TILED, far, heir, PLAIN_BEST], {"plain_best": Answers([VETO])})
    found = selector(plugins).candidates(MATMUL)
    assert [o.contribution.name for o in found] == ["any", "gemv", "heir"]
    plugins = FakePlugins([ANY, TILED, heir], {"heir": Answers([VETO])})
    assert [o.contribution.name for o in selector(plugins).candidates(MATMUL)] == ["any", "tiled"]


# One layout


TILED = offer("tiled", priority=3, layout="tiled")
TILED_GEMV = offer("tiled_gemv", priority=50, layout="tiled", tokens=TokensRequirement(max=8))
PLAIN_BEST = offer("plain_best", priority=4)


def test_all_winners_share_the_layout_of_the_best() -> None:
    plan = select(TILED, TILED_GEMV, PLAIN_BEST, ANY)
    assert served(plan) == [("1-8", "tiled_gemv"), ("9+", "tiled")]
    assert plan.layout == "tiled"
    assert reasons(plan) == {"plain_best": ["layout"], "any": ["layout"]}
    (first, _) = plan.rejected
    assert (first.reasons[0].wanted, first.reasons[0].supported) == (
        "layout tiled, or priority above 50",
        "layout plain, priority 0",
    )


def test_a_layout_that_leaves_steps_unserved_loses() -> None:
    plan = select(TILED_GEMV, PLAIN_BEST)
    assert served(plan) == [("any", "plain_best")]
    assert reasons(plan) == {"tiled_gemv": ["tokens"]}
    only_prefill = offer("prefill_tiled", priority=60, layout="tiled", tokens=TokensRequirement(phase="prefill"))
    only_decode = offer("decode_tiled", priority=1, layout="tiled", tokens=TokensRequirement(phase="decode"))
    assert served(select(only_prefill, PLAIN_BEST)) == [("any", "plain_best")]
    assert select(only_prefill, PLAIN_BEST, only_decode).layout == "tiled"


def test_a_veto_can_cost_a_layout() -> None:
    plugins = FakePlugins([TILED, TILED_GEMV, PLAIN_BEST], {"tiled": Answers([VETO])})
    plan = selector(plugins).select(MATMUL)
    assert served(plan) == [("any", "plain_best")]
    assert reasons(plan) == {"tiled": ["toy-veto"], "tiled_gemv": ["tokens"]}


def test_a_veto_can_give_a_layout_back() -> None:
    """The heir of the only one that fills a gap drops out, so the gap is filled again, and nobody is told of it."""
    heir = offer("heir", priority=40, replaces="tiled")
    small = offer("tiled_small", layout="tiled", tokens=TokensRequirement(max=4))
    plan = selector(FakePlugins([TILED, TILED_GEMV, small, heir], {"heir": Answers([VETO])})).select(MATMUL)
    assert served(plan) == [("1-8", "tiled_gemv"), ("9+", "tiled")]
    assert reasons(plan) == {"heir": ["toy-veto"], "tiled_small": ["comes-after"]}


def test_the_chosen_one_sets_the_layout() -> None:
    plan = select(TILED, TILED_GEMV, PLAIN_BEST, ANY, choice="any")
    assert served(plan) == [("any", "any")]
    assert reasons(plan)["tiled_gemv"] == ["layout"]


def test_the_measured_one_sets_the_layout() -> None:
    assert served(select(TILED, TILED_GEMV, PLAIN_BEST, tuned="plain_best")) == [("any", "plain_best")]


def test_a_choice_is_never_dropped_for_its_layout() -> None:
    """Alone in a layout that does not serve every step: an error, not another winner."""
    with pytest.raises(SelectionError) as caught:
        select(TILED_GEMV, PLAIN_BEST, choice="tiled_gemv")
    assert [r.code for r in caught.value.rejected["tiled_gemv"]] == ["tokens"]
    assert "Can serve: plain_best." in str(caught.value)
    plugins = FakePlugins([TILED, TILED_GEMV, PLAIN_BEST], {"tiled": Answers([VETO])})
    with pytest.raises(SelectionError, match="--linear-backend tiled_gemv: it cannot serve"):
        selector(plugins, {"linear": "tiled_gemv"}).select(MATMUL)


# Adapters


class Multiples64(ReferenceAttention):
    """A backend for head sizes that are multiples of 64; says so again in ``supports``."""

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        return [VETO] if (workload.head_size or 0) % 64 else []


PAGED = offer(
    "paged",
    family="attention",
    priority=10,
    layout="tiled",
    requires=(HeadMultipleRequirement(64), FeatureRequirement((Feature.SINKS,))),
)
SIMPLE = offer("simple", family="attention", priority=1)
EIGHTY, NINETY_SIX, ONE_TWENTY_EIGHT = (AttentionWorkload(dtype="float32", head_size=n) for n in (80, 96, 128))


def plan_for(workload: AttentionWorkload, choice: str | None = None, simple: int = 1) -> Plan:
    offers = [PAGED, offer("simple", family="attention", priority=simple)]
    plugins = FakePlugins(offers, {"paged": Multiples64, "simple": ReferenceAttention})
    return selector(plugins, {"attention": choice} if choice else {}).select(workload)


def test_an_adapter_is_a_candidate_just_below_what_it_adapts() -> None:
    plan = plan_for(EIGHTY)
    assert served(plan) == [("any", "paged+pad64")]
    assert plan.layout == "tiled+pad64"
    assert plan.offer.contribution.priority == 9
    assert plan.offer.plugin == "acme"
    assert reasons(plan) == {"paged": ["head-multiple"], "simple": ["layout"]}
    assert served(plan_for(EIGHTY, simple=9)) == [("any", "paged+pad64")]
    assert served(plan_for(EIGHTY, simple=10)) == [("any", "simple")]
    assert reasons(plan_for(EIGHTY, simple=10)) == {"paged": ["head-multiple"], "paged+pad64": ["layout"]}


def test_no_adapter_where_none_is_needed() -> None:
    plan = plan_for(ONE_TWENTY_EIGHT)
    assert served(plan) == [("any", "paged")]
    assert reasons(plan) == {"simple": ["layout"]}
    assert served(plan_for(AttentionWorkload(dtype="float32"))) == [("any", "paged")]


def test_adapters_are_chosen_by_their_full_name() -> None:
    plan = plan_for(EIGHTY, "paged+pad64", simple=99)
    assert (served(plan), plan.entries[0].rule) == ([("any", "paged+pad64")], "flag")
    with pytest.raises(UnknownNameError, match="did you mean 'paged'"):
        plan_for(ONE_TWENTY_EIGHT, "paged+pad64")


def test_without_the_suffix_it_fails_and_names_the_adapter() -> None:
    with pytest.raises(SelectionError) as caught:
        plan_for(EIGHTY, "paged")
    assert [r.code for r in caught.value.rejected["paged"]] == ["head-multiple"]
    assert "Can serve: paged+pad64, simple." in str(caught.value)
    assert "(wanted 80, supported multiples of 64)" in str(caught.value)


def test_an_adapter_keeps_the_other_requirements() -> None:
    need = (*PAGED.contribution.requires, OneOfRequirement("block_size", (32,)))
    paged = offer("paged", family="attention", requires=need)
    plan = select(paged, SIMPLE, workload=AttentionWorkload(head_size=80, block_size=16))
    assert reasons(plan) == {"paged": ["head-multiple", "block-size"], "paged+pad64": ["block-size"]}
    sinks = frozenset({Feature.SINKS})
    loaded = FakePlugins([PAGED], {"paged": Multiples64})
    plan = selector(loaded).select(AttentionWorkload(head_size=80, features=sinks))
    assert served(plan) == [("any", "paged+pad64")]


def test_the_adapted_target_is_asked_about_the_padded_size() -> None:
    """Asked about 96, Multiples64 would veto."""
    plugins = FakePlugins([PAGED], {"paged": Multiples64})
    assert served(selector(plugins).select(NINETY_SIX)) == [("any", "paged+pad64")]

    class Never(ReferenceAttention):
        @classmethod
        def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
            assert (workload.head_size, device) == (128, TOY)
            return [VETO]

    never: type[AttentionBackend] = Never
    plan = selector(FakePlugins([PAGED, SIMPLE], {"paged": never})).select(NINETY_SIX)
    assert reasons(plan) == {"paged": ["head-multiple"], "paged+pad64": ["toy-veto"]}


def test_what_is_replaced_is_replaced_with_its_adapters() -> None:
    heir = offer("heir", family="attention", replaces="paged", priority=-5)
    plan = select(PAGED, heir, workload=EIGHTY)
    assert served(plan) == [("any", "heir")]
    assert reasons(plan) == {"paged": ["head-multiple", "replaced"], "paged+pad64": ["replaced"]}


def test_other_families_have_no_adapters() -> None:
    assert served(select(ANY)) == [("any", "any")]
    assert not select(ANY).rejected
