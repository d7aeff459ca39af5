"""Ranges of steps: those that candidates are for, and those that a plan is cut into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hardpoint.plugin_host import Offer
from hardpoint.selection.plan import PlanEntry, StepRange
from hardpoint_plugin_api import Phase, Requirement, TokensRequirement

_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def tokens_of(offer: Offer) -> TokensRequirement:
    """The steps that a candidate is for."""
    return tokens_in(offer.contribution.requires)


def tokens_in(requires: Iterable[Requirement]) -> TokensRequirement:
    """The steps that requirements leave."""
    return next((r for r in requires if isinstance(r, TokensRequirement)), TokensRequirement())


def covers(need: TokensRequirement, where: StepRange) -> bool:
    """Whether ``need`` holds in all of a range."""
    below_max = need.max is None or (where.max is not None and where.max <= need.max)
    return need.min <= where.min and below_max and (need.phase is None or need.phase == where.phase)


def overlap(need: TokensRequirement, where: StepRange) -> bool:
    """Whether ``need`` holds in any of a range."""
    return (
        (where.max is None or need.min <= where.max)
        and (need.max is None or where.min <= need.max)
        and (None in (need.phase, where.phase) or need.phase == where.phase)
    )


def cut(needs: Iterable[TokensRequirement]) -> list[StepRange]:
    """All steps, cut where any need begins or ends, per phase where any is for one phase only."""
    needs = list(needs)
    cuts = sorted({1} | {n.min for n in needs} | {n.max + 1 for n in needs if n.max is not None})
    phases: tuple[Phase | None, ...] = _PHASES if any(n.phase for n in needs) else (None,)
    uppers = [*(c - 1 for c in cuts[1:]), None]
    return [StepRange(low, high, phase) for phase in phases for low, high in zip(cuts, uppers, strict=True)]


def merge(entries: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Join adjacent ranges of one winner, and the phases where both go alike; what is said of the first stays.

    One answer is written in one way, whatever losers cut the ranges: the table's digest rests on it.
    """
    merged: list[PlanEntry] = []
    for entry in entries:
        last = merged[-1] if merged else None
        if last and last.offer == entry.offer and last.range.phase == entry.range.phase:
            merged[-1] = replace(last, range=replace(last.range, max=entry.range.max))
        else:
            merged.append(entry)
    prefill, decode = (
        [replace(e, range=replace(e.range, phase=None)) for e in merged if e.range.phase == phase] for phase in _PHASES
    )
    alike = [(e.range, e.offer) for e in prefill] == [(e.range, e.offer) for e in decode]
    return prefill if prefill and alike else merged
