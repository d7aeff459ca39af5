"""Faults planted in drafters: each is caught, by the check that should."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from hardpoint.conformance.families.drafter import DrafterTrials
from hardpoint.conformance.site import Site
from hardpoint.drafters.ngram import NgramDrafter
from hardpoint_plugin_api import NO_DRAFT, DraftCall
from tests.conformance.trying import first_failure, subject


class Faulty(NgramDrafter):
    """The drafter of core's with a fault of the name ``fault``."""

    fault: ClassVar[str]
    _calls = 0

    def propose(self, call: DraftCall) -> torch.Tensor:
        drafts, fault = super().propose(call), self.fault
        if fault == "beyond the vocabulary":
            return torch.where(drafts == NO_DRAFT, drafts, drafts + 45)
        if fault == "one too many":
            return torch.cat([drafts, drafts[:, :1]], 1)
        if fault == "32 bits":
            return drafts.int()
        if fault == "a gap":
            drafts[:, 0] = NO_DRAFT
        if fault == "counts calls":
            self._calls += 1
            return torch.full_like(drafts, self._calls)
        if fault == "reads behind the end":
            return call.tokens[call.slots][:, call.longest : call.longest + drafts.shape[1]].long()
        if fault == "the neighbour's":
            return drafts.roll(1, 0)
        if fault == "appends in place":
            call.tokens[call.slots, call.lengths] = 7
        if fault == "sorts slots":
            call.slots.copy_(call.slots.flip(0))
        return drafts


def test_the_healthy_one_passes(site: Site) -> None:
    assert first_failure(subject(site, NgramDrafter, "drafter", name="ngram"), DrafterTrials()) is None


@pytest.mark.parametrize(
    ("fault", "check", "code"),
    [
        ("beyond the vocabulary", "values", "vocabulary"),
        ("one too many", "values", "form"),
        ("32 bits", "values", "form"),
        ("a gap", "values", "gap"),
        ("counts calls", "repetition", "repetition"),
        ("reads behind the end", "alone", "behind"),
        ("the neighbour's", "alone", "alone"),
        ("appends in place", "inputs", "mutated"),
        ("sorts slots", "inputs", "mutated"),
    ],
)
def test_a_faulty_one_is_caught(site: Site, fault: str, check: str, code: str) -> None:
    target = type("Planted", (Faulty,), {"fault": fault})
    found = first_failure(subject(site, target, "drafter", name="ngram"), DrafterTrials())
    assert found is not None
    assert (found.check, found.codes) == (check, {code}), str(found)
