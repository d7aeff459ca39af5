"""From measurements to verdicts: who serves how many tokens, when all of a plan share a layout.

The kernel that serves now stays unless another takes less than a margin below 1 of its time, so that noise decides
nothing. Winners share the form of their weights and inputs, which is chosen first, by some numbers of tokens that all
count alike: the geometric mean of the winners' times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hardpoint.plugin_host import Offer
from hardpoint.selection.plan import Plan, StepRange
from hardpoint.selection.ranges import covers, cut, tokens_of
from hardpoint.selection.tuning import Verdict
from hardpoint_plugin_api import Feature, QuantSpec, TokensRequirement


@dataclass(frozen=True)
class Form:
    """The properties that all winners of a plan share: the weight's layout, and the spec of inputs (None: unquantized).

    Inputs come rounded only where all winners take them so; each of them can round for itself.
    """

    layout: str
    input_spec: QuantSpec | None = None

    def __str__(self) -> str:
        return f"layout {self.layout}" + (f", input {self.input_spec}" if self.input_spec else "")


@dataclass(frozen=True)
class Contender:
    """A candidate that gets its input in a form."""

    offer: Offer
    input_spec: QuantSpec | None = None

    @property
    def name(self) -> str:
        """The candidate's."""
        return self.offer.contribution.name

    @property
    def form(self) -> Form:
        """The form of plans that it is for."""
        return Form(self.offer.contribution.layout, self.input_spec)

    def serves(self, tokens: int) -> bool:
        """True where the candidate takes steps of so many tokens."""
        return covers(tokens_of(self.offer), StepRange(tokens, tokens))


Times = Mapping[int, Mapping[Contender, float]]
"""Seconds by number of tokens."""


@dataclass(frozen=True)
class Decision:
    """The winner for each number of tokens that was measured; all have ``form``.

    ``seconds`` are the means by which the form was chosen, of each form that serves every step.
    """

    form: Form
    winners: Mapping[int, Contender]
    seconds: Mapping[Form, float]


PriorityOf = Callable[[Offer, StepRange], int]
"""The priority of a candidate in all steps of a range, as ``Selector.priority`` has it."""


def decide(
    times: Times,
    plan: Plan,
    decisive: Collection[int],
    margin: float,
    priority: PriorityOf,
    passed_over: Collection[str] = (),
) -> Decision:
    """Decide who serves, where ``plan`` is what serves now.

    Every contender is measured with every number of tokens that it serves, each candidate also with plain input.
    ``decisive`` are the numbers of tokens that choose the form; ``margin`` is a share of the time, as in 0.05.
    Where nothing of a form serves now, the candidate of the highest ``priority`` is the one that others must beat.
    An infinite time is that of what could not run, or was not tried. ``passed_over`` are layouts that stay where they
    serve now, and are taken nowhere else.
    """
    contenders = list(dict.fromkeys(contender for row in times.values() for contender in row))
    now = _form_of(plan, contenders)
    answers = {}
    for form in dict.fromkeys(contender.form for contender in contenders):
        group = [c for c in contenders if c.form == form]
        if _serves_all(group):
            answers[form] = _winners(times, plan, group, decisive, margin, priority)
    seconds = {
        form: math.exp(sum(math.log(times[n][winners[n]]) for n in decisive) / len(decisive))
        for form, winners in answers.items()
    }
    able = [form for form in seconds if form == now or form.layout not in passed_over] or list(seconds)
    best = min(able, key=lambda form: (seconds[form], str(form)))
    form = best if now not in seconds or seconds[best] < (1 - margin) * seconds[now] else now
    return Decision(form, answers[form], seconds)


def serving(plan: Plan, tokens: int) -> Offer:
    """The winner for steps of so many tokens, of either phase."""
    return next(e.offer for e in plan.entries if e.range.min <= tokens <= (e.range.max or tokens))


def _form_of(plan: Plan, contenders: Iterable[Contender]) -> Form:
    """The form in which ``plan`` runs."""
    winners = {entry.offer for entry in plan.entries}
    shared = {spec for spec in {c.input_spec for c in contenders} if spec and winners <= _taking(spec, contenders)}
    return Form(plan.layout, next(iter(shared), None))


def _taking(spec: QuantSpec, contenders: Iterable[Contender]) -> set[Offer]:
    return {c.offer for c in contenders if c.input_spec == spec}


def _serves_all(group: Sequence[Contender]) -> bool:
    needs = [tokens_of(contender.offer) for contender in group]
    return all(any(covers(need, where) for need in needs) for where in cut(needs))


def _winners(
    times: Times,
    plan: Plan,
    group: Sequence[Contender],
    decisive: Collection[int],
    margin: float,
    priority: PriorityOf,
) -> dict[int, Contender]:
    """The winner of one form for each number of tokens."""

    def before(able: Iterable[Contender], winner: Offer, where: StepRange) -> Contender:
        """The candidate of ``able`` for a range before anything is measured: the plan's winner, else by priority."""
        return min(able, key=lambda c: (c.offer != winner, -priority(c.offer, where), c.name))

    if Feature.BATCH_INVARIANT in plan.workload.features:  # one implementation serves steps of every size
        able = [c for c in group if tokens_of(c.offer) == TokensRequirement()]
        sums = {c: math.fsum(math.log(times[n][c]) for n in decisive) / len(decisive) for c in able}
        now = before(able, plan.entries[0].offer, StepRange())
        best = min(able, key=lambda c: sums[c])
        return dict.fromkeys(times, best if sums[best] < sums[now] + math.log(1 - margin) else now)
    winners = {}
    for tokens, row in times.items():
        able = [contender for contender in group if contender in row]
        now = before(able, serving(plan, tokens), StepRange(tokens, tokens))
        best = min(able, key=lambda contender: row[contender])
        winners[tokens] = best if row[best] < (1 - margin) * row[now] else now
    return winners


def verdicts(
    decision: Decision, times: Times, versions: Mapping[str, str], context: Mapping[str, str]
) -> tuple[Verdict, ...]:
    """The tuning file's winners, in ranges: between two measured numbers the larger one's winner serves."""
    found: list[Verdict] = []
    lowest = 1
    for tokens in sorted(decision.winners):
        winner = decision.winners[tokens]
        measured = {tokens: _microseconds(times[tokens], decision.form)}
        last = found[-1] if found else None
        if last and last.name == winner.name:
            need = TokensRequirement(last.tokens.min, tokens)
            found[-1] = replace(last, tokens=need, measured={**last.measured, **measured})
        else:
            found.append(Verdict(winner.name, TokensRequirement(lowest, tokens), measured, versions, context))
        lowest = tokens + 1
    found[-1] = replace(found[-1], tokens=replace(found[-1].tokens, max=None))
    return tuple(found)


def _microseconds(row: Mapping[Contender, float], form: Form) -> dict[str, float]:
    """Each candidate's that ran, with input in the decided form where it takes that."""
    found = {}
    for contender, seconds in row.items():
        if math.isfinite(seconds) and contender.input_spec in (None, form.input_spec):
            found[contender] = round(seconds * 1e6, 2)
    preferred = sorted(found, key=lambda contender: contender.input_spec is not None)
    return {contender.name: found[contender] for contender in preferred}


def within_noise(old: Sequence[Verdict], new: Sequence[Verdict], noise: float) -> bool:
    """Whether ``new`` says what ``old`` says, and no winner's times differ by more than the share ``noise``."""
    said = [[(v.name, v.tokens, v.versions, v.context) for v in verdicts] for verdicts in (old, new)]
    if said[0] != said[1]:
        return False
    pairs = [
        (before.measured.get(tokens, {}).get(after.name), times[after.name])
        for before, after in zip(old, new, strict=True)
        for tokens, times in after.measured.items()
    ]
    return all(before is not None and abs(after - before) <= noise * before for before, after in pairs) and all(
        before.measured.keys() == after.measured.keys() for before, after in zip(old, new, strict=True)
    )
