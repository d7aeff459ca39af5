"""The order of candidates: the flag, the tuning file, priority, the name; and failures of one asked for by name."""

from __future__ import annotations

import pytest

from hardpoint.selection import Settings, TuningFile, Verdict
from hardpoint_plugin_api import AttentionWorkload, LinearWorkload, OpWorkload, SelectionError, UnknownNameError
from hardpoint_plugin_api.requirements import ArchRequirement, FeatureRequirement, OneOfRequirement
from tests.selection.fakes import MATMUL, TOY, VETO, Answers, FakePlugins, offer, reasons, select, selector, served

LOW, HIGH, ALSO_HIGH = offer("low", priority=1), offer("b_high", priority=5), offer("a_high", priority=5)
NORM = OpWorkload(of="norm", dtype="float32")
NORMS = [offer("reference", family="op", of="norm", plugin="core"), offer("fast", family="op", of="norm", priority=5)]


@pytest.mark.parametrize(
    ("choice", "tuned", "winner", "rule"),
    [
        (None, None, "a_high", "priority"),
        (None, "b_high", "b_high", "tuning file"),
        (None, "low", "low", "tuning file"),
        ("low", None, "low", "flag"),
        ("low", "b_high", "low", "flag"),
        ("b_high", "b_high", "b_high", "flag"),
        (None, "gone", "a_high", "priority"),
    ],
)
def test_flag_then_tuning_then_priority_then_name(
    choice: str | None, tuned: str | None, winner: str, rule: str
) -> None:
    plan = select(LOW, HIGH, ALSO_HIGH, choice=choice, tuned=tuned)
    assert served(plan) == [("any", winner)]
    assert plan.entries[0].rule == rule
    code = "not-asked-for" if choice else "comes-after"
    assert reasons(plan) == {n: [code] for n in ("a_high", "b_high", "low") if n != winner}


def test_the_only_candidate_says_so() -> None:
    elsewhere = offer("elsewhere", priority=9, platforms=("other",))
    plan = select(LOW, elsewhere)
    assert plan.entries[0].rule == "only candidate"
    (rejection,) = plan.rejected
    assert (rejection.reasons[0].wanted, rejection.reasons[0].supported) == ("toy", "other")


def test_a_loser_is_told_what_to_beat() -> None:
    (against_low,) = (r.reasons for r in select(LOW, HIGH).rejected)
    assert str(against_low[0]) == "b_high comes before it (wanted priority above 5, supported priority 1)"
    (against_high,) = (r.reasons for r in select(LOW, HIGH, tuned="low").rejected)
    assert "tuning file" in str(against_high[0])


def test_tuning_counts_for_its_device_and_workload_alone() -> None:
    key = (TOY.name, "linear", None, MATMUL.key())
    for wrong in (("Toy 2", *key[1:]), (*key[:3], "dtype=bfloat16"), (key[0], "experts", *key[2:])):
        plan = selector(FakePlugins([LOW, HIGH]), tuning=TuningFile({wrong: (Verdict("low"),)})).select(MATMUL)
        assert served(plan) == [("any", "b_high")]
    measured = selector(FakePlugins([LOW, HIGH]), tuning=TuningFile({key: (Verdict("low"),)})).select(MATMUL)
    assert served(measured) == [("any", "low")]


def test_a_measured_winner_that_cannot_serve_is_passed_over_with_its_reason() -> None:
    key = (TOY.name, "linear", None, MATMUL.key())
    plugins = FakePlugins([LOW, HIGH], {"low": Answers([VETO])})
    plan = selector(plugins, tuning=TuningFile({key: (Verdict("low"),)})).select(MATMUL)
    assert served(plan) == [("any", "b_high")]
    assert reasons(plan) == {"low": ["toy-veto"]}


def test_a_flag_for_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError) as caught:
        select(LOW, HIGH, choice="b-hihg")
    assert caught.value.nearest == "b_high"
    assert caught.value.known == ("b_high", "low")
    assert "linear implementation 'b-hihg'; did you mean 'b_high'?" in str(caught.value)
    assert "Asked for by --linear-backend." in str(caught.value)


def test_a_flag_for_one_that_cannot_serve_fails_closed() -> None:
    picky = offer(
        "picky", requires=(OneOfRequirement("dtype", ("float16",)), ArchRequirement(("toy2",))), platforms=("other",)
    )
    with pytest.raises(SelectionError) as caught:
        select(picky, LOW, HIGH, choice="picky")
    assert [r.code for r in caught.value.rejected["picky"]] == ["platform", "dtype", "arch"]
    text = str(caught.value)
    assert "--linear-backend picky: it cannot serve linear (dtype=float32" in text
    assert "Can serve: b_high, low." in text
    assert "(wanted float32, supported float16)" in text
    assert "(wanted toy1, supported toy2)" in text


def test_alternatives_hold_what_can_serve_and_only_that() -> None:
    need = (OneOfRequirement("head_size", (64,)),)
    offers = [
        offer("fixed", family="attention", requires=need),
        offer("also_fixed", family="attention", requires=need),
        offer("old", family="attention"),
        offer("new", family="attention", replaces="old"),
    ]
    with pytest.raises(SelectionError, match=r"Can serve: new\."):
        select(*offers, workload=AttentionWorkload(head_size=80), choice="fixed")
    with pytest.raises(SelectionError, match=r"Can serve: nothing\."):
        select(offers[0], workload=AttentionWorkload(head_size=80), choice="fixed")


def test_a_choice_for_one_op_beats_one_for_the_family() -> None:
    settings = Settings({"op": "reference", "op.norm": "fast", "attention": "paged"})
    asked = {(f, o): settings.choice(f, o) for f, o in (("op", "norm"), ("op", "silu"), ("attention", None))}
    found = {slot: (c.name, c.flag) for slot, c in asked.items() if c}
    assert found == {
        ("op", "norm"): ("fast", "--use op.norm"),
        ("op", "silu"): ("reference", "--use op"),
        ("attention", None): ("paged", "--attention-backend"),
    }
    assert settings.choice("linear", None) is None


def test_a_choice_for_a_family_holds_where_it_is_offered() -> None:
    """One for a slot is exact; of what a name is not offered for, others are chosen."""
    offers = [offer("plain", family="attention"), offer("other", family="attention")]
    workload = AttentionWorkload(head_size=64)
    everywhere = selector(FakePlugins(offers), {"attention": "elsewhere"})
    assert [e.offer.contribution.name for e in everywhere.select(workload).entries] == ["other"]
    exact = selector(FakePlugins(offers), {"attention.causal": "plain", "attention": "other"})
    (entry,) = exact.select(workload).entries
    assert (entry.offer.contribution.name, entry.rule) == ("plain", "flag")
    with pytest.raises(UnknownNameError, match=r"Asked for by --use attention\.causal"):
        selector(FakePlugins(offers), {"attention.causal": "elsewhere"}).select(workload)


def test_a_choice_that_does_not_bind() -> None:
    """It is taken where it can serve, and the automatic choice elsewhere, until the same is asked for as binding."""
    high = offer("b_high", priority=10)
    wide = offer("wide", requires=(OneOfRequirement("in_features", (64,)),))
    asker = selector(FakePlugins([high, wide]), {"linear": "wide"})

    def chosen(width: int, binding: bool) -> str:
        (entry,) = asker.select(LinearWorkload(in_features=width), binding=binding).entries
        return entry.offer.contribution.name

    assert (chosen(64, False), chosen(32, False)) == ("wide", "b_high")
    assert (chosen(64, True), chosen(64, False)) == ("wide", "wide")
    for _ in range(2):
        with pytest.raises(SelectionError, match=r"--linear-backend wide: it cannot serve linear \(in_features=32\)"):
            asker.select(LinearWorkload(in_features=32))
    assert chosen(32, False) == "b_high"
    with pytest.raises(UnknownNameError, match=r"Asked for by --linear-backend"):
        selector(FakePlugins([high]), {"linear": "missing"}).select(LinearWorkload(), binding=False)


def test_nothing_can_serve_says_everything() -> None:
    offers = [
        offer("far", platforms=("other",), requires=(FeatureRequirement(()), ArchRequirement(("toy2", "toy3*")))),
        offer("broken"),
        offer("vetoed"),
    ]
    plugins = FakePlugins(offers, {"broken": ImportError("libtoy.so"), "vetoed": Answers([VETO, VETO])})
    with pytest.raises(SelectionError) as caught:
        selector(plugins).select(MATMUL)
    codes = {name: [r.code for r in found] for name, found in caught.value.rejected.items()}
    assert codes == {"far": ["platform", "arch"], "broken": ["load-failed"], "vetoed": ["toy-veto"] * 2}
    assert "nothing can serve linear (dtype=float32 in_features=8 out_features=4) on Toy 1" in str(caught.value)
    assert "libtoy.so" in str(caught.value)


def test_no_candidates_at_all() -> None:
    with pytest.raises(SelectionError, match="nothing can serve op silu") as caught:
        select(workload=OpWorkload(of="silu"))
    assert not caught.value.rejected


def test_equal_workloads_are_answered_once() -> None:
    plugins = FakePlugins([LOW], {"low": (answers := Answers([]))})
    chooser = selector(plugins)
    first = chooser.select(MATMUL)
    twin = type(MATMUL)(dtype="float32", in_features=8, out_features=4)
    assert twin is not MATMUL
    assert chooser.select(twin) is first
    assert answers.asked == [(MATMUL, TOY)]
    other = chooser.select(type(MATMUL)(dtype="float32", in_features=8, out_features=5))
    assert chooser.plans == (first, other)


# Replacing


def test_a_replacement_takes_the_place_whatever_the_priorities() -> None:
    heir = offer("heir", replaces="b_high", priority=-1, plugin="other")
    plan = select(HIGH, heir, LOW)
    assert served(plan) == [("any", "low")]
    assert reasons(plan) == {"b_high": ["replaced"], "heir": ["comes-after"]}
    with pytest.raises(SelectionError, match="plugin other replaces it by heir"):
        select(HIGH, heir, LOW, choice="b_high")


def test_replacements_chain() -> None:
    second = offer("second", replaces="b_high", priority=9)
    third = offer("third", replaces="second")
    plan = select(HIGH, second, third)
    assert served(plan) == [("any", "third")]
    assert reasons(plan) == {"b_high": ["replaced"], "second": ["replaced"]}


@pytest.mark.parametrize("how", ["platform", "requirement", "veto", "load"])
def test_what_cannot_serve_replaces_nothing(how: str) -> None:
    """A plugin for another device must not cost this one what it would replace there."""
    heir = offer(
        "heir",
        replaces="low",
        platforms=("other",) if how == "platform" else (),
        requires=(OneOfRequirement("dtype", ("float16",)),) if how == "requirement" else (),
    )
    targets: dict[str, dict[str, object]] = {"veto": {"heir": Answers([VETO])}, "load": {"heir": ImportError("gone")}}
    plan = selector(FakePlugins([LOW, heir], targets.get(how))).select(MATMUL)
    assert served(plan) == [("any", "low")]
    code = {"requirement": "dtype", "veto": "toy-veto", "load": "load-failed"}.get(how, how)
    assert reasons(plan) == {"heir": [code]}


# Switching custom ops


@pytest.mark.parametrize(
    ("custom_ops", "winner"),
    [
        (("all",), "fast"),
        ((), "fast"),
        (("none",), "reference"),
        (("none", "+norm"), "fast"),
        (("none", "+silu"), "reference"),
        (("all", "-norm"), "reference"),
        (("-norm",), "reference"),
        (("all", "-silu"), "fast"),
        (("all", "+norm"), "fast"),
    ],
)
def test_custom_ops_switch_off_plugins_kernels(custom_ops: tuple[str, ...], winner: str) -> None:
    plan = selector(FakePlugins(NORMS), custom_ops=custom_ops).select(NORM)
    assert served(plan) == [("any", winner)]
    loser, code = ("fast", "custom-op-off") if winner == "reference" else ("reference", "comes-after")
    assert reasons(plan) == {loser: [code]}


def test_custom_ops_leave_core_all_its_forms() -> None:
    """The reference of an op fits one cache layout alone; what core composes of others fits any."""
    composed = offer("composed", family="op", of="norm", priority=1, plugin="core")
    plan = selector(FakePlugins([*NORMS, composed]), custom_ops=("none",)).select(NORM)
    assert served(plan) == [("any", "composed")]
    assert reasons(plan) == {"fast": ["custom-op-off"], "reference": ["comes-after"]}


@pytest.mark.parametrize("custom_ops", [("none",), ("all", "-norm")])
def test_a_choice_that_custom_ops_switch_off_fails(custom_ops: tuple[str, ...]) -> None:
    with pytest.raises(SelectionError) as caught:
        selector(FakePlugins(NORMS), {"op.norm": "fast"}, custom_ops).select(NORM)
    assert [r.code for r in caught.value.rejected["fast"]] == ["custom-op-off"]
    text = str(caught.value)
    assert "--use op.norm fast" in text
    assert "Can serve: reference." in text
    assert f"--custom-ops {','.join(custom_ops)}" in text
    assert "fix: --custom-ops +norm" in text


def test_a_choice_goes_with_the_switch_that_leaves_it_on() -> None:
    on = selector(FakePlugins(NORMS), {"op.norm": "fast"}, ("none", "+norm")).select(NORM)
    assert (served(on), on.entries[0].rule) == ([("any", "fast")], "flag")
    reference = selector(FakePlugins(NORMS), {"op.norm": "reference"}, ("none",)).select(NORM)
    assert (served(reference), reference.entries[0].rule) == ([("any", "reference")], "flag")


def test_custom_ops_switch_ops_only() -> None:
    assert served(selector(FakePlugins([LOW, HIGH]), custom_ops=("none", "-linear")).select(MATMUL)) == [
        ("any", "b_high")
    ]
