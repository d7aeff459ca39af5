"""Faults planted in all-to-alls: each is caught, by the check that should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from hardpoint.conformance.families.all2all import All2AllTrials
from hardpoint.conformance.site import Site
from hardpoint.reference.all2all import AllGatherReduceScatter, AllToAll, Replicated
from hardpoint.reference.local_all2all import LocalAll2All, LocalBatches
from hardpoint_plugin_api import All2All, Dispatched, DispatchHandle
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor


class IdsOffByOne(AllGatherReduceScatter):
    def _own(self, ids: Tensor) -> Tensor:
        return super()._own(ids + 1)


class IdsOfAllRanks(AllToAll):
    """Leaves ids as they count the experts of all ranks."""

    def _own(self, ids: Tensor) -> Tensor:
        return ids


class AbsentIsTheFirst(AllGatherReduceScatter):
    """Takes -1 for the rank's first expert."""

    def _own(self, ids: Tensor) -> Tensor:
        return super()._own(ids).clamp(min=0)


class WeightedTwice(LocalBatches):
    def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
        slots, weights = cast(DispatchHandle[tuple[Tensor, Tensor]], handle).take()
        super().combine(y, DispatchHandle((slots, weights * weights)), out)


class NotWeighted(LocalBatches):
    def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
        slots, weights = cast(DispatchHandle[tuple[Tensor, Tensor]], handle).take()
        super().combine(y, DispatchHandle((slots, torch.ones_like(weights))), out)


class CountsOneShort(LocalBatches):
    def dispatch(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Dispatched:
        sent = super().dispatch(x, scales, ids, weights)
        assert sent.counts is not None
        return replace(sent, counts=(sent.counts - 1).clamp(min=0))


class CountsAreLong(LocalBatches):
    def dispatch(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Dispatched:
        sent = super().dispatch(x, scales, ids, weights)
        assert sent.counts is not None
        return replace(sent, counts=sent.counts.long())


class HandleLives(LocalAll2All):
    def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
        out.copy_(y)


class RowsOfTheFirstStep(AllGatherReduceScatter):
    """Asks once how many tokens ranks have."""

    def _rows(self, x: Tensor) -> list[int]:
        if not hasattr(self, "_known"):
            self._known = super()._rows(x)
        return self._known


class OwnRankAlone(AllGatherReduceScatter):
    """Gives back what this rank's experts made, without the others' part."""

    def _sums(self, y: Tensor, rows: Any) -> Tensor:
        start = sum(rows[: self._group.rank])
        self._group.reduce_scatter(y.clone(), rows)
        return y[start : start + rows[self._group.rank]]


class NeighboursTokens(AllToAll):
    """Sends results home in the opposite order."""

    def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
        super().combine(y, handle, out)
        out.copy_(out.flip(0))


class ScalesStayHome(LocalAll2All):
    def dispatch(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Dispatched:
        return super().dispatch(x, None, ids, weights)


class MarksTheAbsent(LocalAll2All):
    """Writes into the ids that it was given."""

    def dispatch(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Dispatched:
        weights.masked_fill_(ids < 0, 0)
        ids.clamp_(min=0)
        return super().dispatch(x, scales, ids, weights)


class AddsToTheOutput(LocalAll2All):
    """Counts on a result full of zeros."""

    def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
        cast(DispatchHandle[None], handle).take()
        out.add_(y)


class TokensAreZeros(LocalAll2All):
    """Clears the output before it adds: wrong where that is the tokens, which are still to be read."""

    def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
        cast(DispatchHandle[None], handle).take()
        if out.isnan().all():
            out.copy_(y)


class PassedThrough(AllGatherReduceScatter):
    """Keeps tokens at home, as if all of their experts were here."""

    def dispatch(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Dispatched:
        return Dispatched(x, scales, self._own(ids), weights, None, DispatchHandle([x.shape[0]]))

    def _sums(self, y: Tensor, rows: Any) -> Tensor:
        return y


class RowsUnderstated(AllGatherReduceScatter):
    def most_rows(self, tokens: int) -> int:
        return tokens


class SumsThatAreSummed(Replicated):
    """Gives back what all ranks' experts made, which is then summed once more."""

    def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
        cast(DispatchHandle[None], handle).take()
        out.copy_(self._group.all_reduce(y) if y.numel() else y)


LOCAL, BATCHES, GATHER, EXCHANGE = "local", "local_batches", "allgather_reducescatter", "all_to_all"
REDUCE = "replicated"
PLANTED: dict[str, tuple[type[All2All], str, str]] = {
    "ids off by one": (IdsOffByOne, GATHER, "values"),
    "ids of all ranks": (IdsOfAllRanks, EXCHANGE, "values"),
    "absent is the first": (AbsentIsTheFirst, GATHER, "values"),
    "weighted twice": (WeightedTwice, BATCHES, "values"),
    "not weighted": (NotWeighted, BATCHES, "values"),
    "counts one short": (CountsOneShort, BATCHES, "values"),
    "counts of another dtype": (CountsAreLong, BATCHES, "dispatch"),
    "handle reused": (HandleLives, LOCAL, "handle"),
    "rows of the first step": (RowsOfTheFirstStep, GATHER, "values"),
    "other ranks left out": (OwnRankAlone, GATHER, "values"),
    "results in another order": (NeighboursTokens, EXCHANGE, "values"),
    "scales stay at home": (ScalesStayHome, LOCAL, "values"),
    "ids written": (MarksTheAbsent, LOCAL, "inputs"),
    "output added to": (AddsToTheOutput, LOCAL, "values"),
    "tokens taken for the result": (TokensAreZeros, LOCAL, "in-place"),
    "passed through": (PassedThrough, GATHER, "values"),
    "rows understated": (RowsUnderstated, GATHER, "dispatch"),
    "summed twice": (SumsThatAreSummed, REDUCE, "values"),
}


def tried(site: Site, kind: type[All2All], name: str) -> Caught | None:
    ways = ["ep"] if name in (GATHER, EXCHANGE, REDUCE) else ["none", "tp"]
    claims = [{"parallel": ways}, {"feature": ["batch_invariant"]}]
    return first_failure(subject(site, kind, "all2all", name=name, requires=claims), All2AllTrials())


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    kind, name, check = PLANTED[title]
    caught = tried(site, kind, name)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@pytest.mark.parametrize(
    ("kind", "name"), [(LocalAll2All, LOCAL), (LocalBatches, BATCHES), (AllGatherReduceScatter, GATHER)]
)
def test_a_healthy_exchange_passes(site: Site, kind: type[All2All], name: str) -> None:
    caught = tried(site, kind, name)
    assert caught is None, str(caught)
