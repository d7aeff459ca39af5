"""Random candidates against the rules, written down a second time, step by step instead of by ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from hardpoint.plugin_host import Offer
from hardpoint.selection import Plan, SelectionTable, StepRange, TuningFile, Verdict
from hardpoint_plugin_api import Phase, SelectionError, TokensRequirement
from tests.selection.fakes import MATMUL, TOY, VETO, Answers, FakePlugins, offer, selector
from tests.support.examples import examples

BOUND = 12
"""The largest bound of any range drawn; steps past it are all alike."""

Step = tuple[Phase, int]
STEPS: list[Step] = [(phase, tokens) for phase in get_args(Phase) for tokens in range(1, BOUND + 3)]


@dataclass(frozen=True)
class Contest:
    """Candidates, the names of those whose ``supports`` says no, and what was asked for and measured."""

    offers: tuple[Offer, ...]
    vetoed: frozenset[str]
    choice: str | None = None
    tuned: tuple[Verdict, ...] = ()

    def select(self, offers: Sequence[Offer] | None = None) -> tuple[Plan | SelectionError, FakePlugins]:
        targets = {name: Answers([VETO]) for name in self.vetoed}
        plugins = FakePlugins(self.offers if offers is None else offers, targets)
        tuning = TuningFile({(TOY.name, "linear", None, MATMUL.key()): self.tuned})
        chooser = selector(plugins, {"linear": self.choice} if self.choice else {}, tuning=tuning)
        try:
            return chooser.select(MATMUL), plugins
        except SelectionError as error:
            return error, plugins


@st.composite
def ranges(draw: st.DrawFn) -> TokensRequirement:
    low, high = sorted((draw(st.integers(1, BOUND)), draw(st.integers(1, BOUND))))
    phase = draw(st.sampled_from([None, None, *get_args(Phase)]))
    return TokensRequirement(draw(st.sampled_from([1, low])), draw(st.sampled_from([None, high])), phase)


@st.composite
def contests(draw: st.DrawFn, names: str = "abcdef") -> Contest:
    names = names[: draw(st.integers(1, len(names)))]
    offers = tuple(
        offer(
            name,
            priority=draw(st.integers(0, 3)),
            layout=draw(st.sampled_from(["plain", "plain", "tiled", "packed"])),
            tokens=draw(st.none() | ranges()),
            platforms=draw(st.sampled_from([(), (), (), ("other",)])),
        )
        for name in names
    )
    some = st.sampled_from([None, None, *names])
    measured = st.builds(Verdict, st.sampled_from(names), st.just(TokensRequirement()) | ranges())
    vetoed = draw(st.frozensets(st.sampled_from(names), max_size=3))
    return Contest(offers, vetoed, draw(some), tuple(draw(st.lists(measured, max_size=3))))


def accepts(candidate: Offer, step: Step) -> bool:
    return all(isinstance(need, TokensRequirement) and holds(need, step) for need in candidate.contribution.requires)


def holds(need: TokensRequirement, step: Step) -> bool:
    phase, tokens = step
    return need.min <= tokens <= (need.max or tokens) and need.phase in (None, phase)


def in_range(where: StepRange, step: Step) -> bool:
    return where.min <= step[1] <= (where.max or step[1]) and where.phase in (None, step[0])


def expected(contest: Contest) -> dict[Step, str] | None:
    """The winner for each step, or None where there is none. A veto is known here from the start."""
    usable = [o for o in contest.offers if not o.contribution.platforms and o.contribution.name not in contest.vetoed]

    def ranked(offers: Sequence[Offer], measured: set[str]) -> list[Offer]:
        return sorted(
            offers,
            key=lambda o: (
                o.contribution.name != contest.choice,
                o.contribution.name not in measured,
                -o.contribution.priority,
                o.contribution.name,
            ),
        )

    def winner(offers: Sequence[Offer], step: Step) -> str | None:
        measured = {verdict.name for verdict in contest.tuned if holds(verdict.tokens, step)}
        return next((o.contribution.name for o in ranked(offers, measured) if accepts(o, step)), None)

    by_rank = ranked(usable, {verdict.name for verdict in contest.tuned})
    if contest.choice and (not by_rank or by_rank[0].contribution.name != contest.choice):
        return None
    for best in by_rank[:1] if contest.choice else by_rank:
        group = [o for o in by_rank if o.contribution.layout == best.contribution.layout]
        winners = {step: winner(group, step) for step in STEPS}
        if None not in winners.values():
            return {step: str(name) for step, name in winners.items()}
    return None


def who_serves(plan: Plan) -> dict[Step, str]:
    """The winner for each step; fails unless it is exactly one row."""
    found = {}
    for step in STEPS:
        (found[step],) = (e.offer.contribution.name for e in plan.entries if in_range(e.range, step))
    return found


@examples(120)
@given(contests())
def test_the_plan_is_what_the_rules_say(contest: Contest) -> None:
    answer, plugins = contest.select()
    wanted = expected(contest)
    names = {o.contribution.name for o in contest.offers}
    if isinstance(answer, SelectionError):
        assert wanted is None
        assert set(answer.rejected) == ({contest.choice} if contest.choice else names)
        assert all(answer.rejected.values())
        return
    assert who_serves(answer) == wanted
    winners = {e.offer for e in answer.entries}
    for entry in answer.entries:
        low, high = entry.range.min, entry.range.max or BOUND + 2
        phases = (entry.range.phase,) if entry.range.phase else get_args(Phase)
        assert all(accepts(entry.offer, (phase, n)) for phase in phases for n in range(low, high + 1))
    assert {o.contribution.layout for o in winners} == {answer.layout}
    losers = {r.offer.contribution.name: r.reasons for r in answer.rejected}
    assert losers.keys() == names - {o.contribution.name for o in winners}
    assert all(losers.values())
    if not contest.vetoed:
        assert set(plugins.loaded) == {o.contribution.name for o in winners}


@examples(60)
@given(contests(), st.randoms(use_true_random=False))
def test_the_order_of_candidates_changes_nothing(contest: Contest, random: Random) -> None:
    shuffled = list(contest.offers)
    random.shuffle(shuffled)
    first, second = contest.select()[0], contest.select(shuffled)[0]
    if isinstance(first, SelectionError) or isinstance(second, SelectionError):
        assert str(first) == str(second)
        assert type(first) is type(second)
    else:
        assert first == second


@examples(80)
@given(contests(), contests("abcdefg"))
def test_the_digest_is_equal_where_the_same_serve_the_same(left: Contest, right: Contest) -> None:
    """Losers, reasons and rules are no part of it, and one answer has one spelling."""
    with_one_more = Contest((*left.offers, *right.offers[len(left.offers) :]), left.vetoed, left.choice, left.tuned)
    plans = [answer for c in (left, right, with_one_more) if isinstance(answer := c.select()[0], Plan)]
    for a in plans:
        for b in plans:
            assert (SelectionTable([a]).digest == SelectionTable([b]).digest) == (who_serves(a) == who_serves(b))
