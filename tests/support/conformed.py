"""The conformance kit on a plugin's own contributions, on a GPU whose tensors are on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice

import torch

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.families.experts import ExpertsTrials
from hardpoint.conformance.families.latent import LatentTrials
from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.generators import Generator
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.plugin_host import discover

_GENERATORS: tuple[Generator, ...] = (AttentionTrials(), LatentTrials(), LinearTrials(), ExpertsTrials())


def faults(platform: str, name: str, every: int, cases: str = "*") -> Iterator[str]:
    """The kit's findings on the contribution ``name``, in each ``every``-th of its trials at level quick that match.

    Raises AssertionError where no trial compared a value.
    """
    site = replace(Site.open(discover(), platform), device=torch.device("cpu"))  # as tensors there say of themselves
    (offer,) = (
        offer
        for family in ("attention", "linear", "experts")
        for offer in site.plugins.offers(family)
        if (offer.plugin, offer.contribution.name) == (platform, name)
    )
    subject = Subject.load(offer, site)
    (generator,) = (
        one for one in _GENERATORS if one.family == offer.contribution.family and one.serves(offer.contribution)
    )
    compared = 0
    trials = (trial for trial in generator.trials(subject, Plan()) if fnmatchcase(trial.case, cases))
    for trial in islice(trials, 0, None, every):
        for check, finding in trial.run():
            compared += check in ("values", "round-trip") and finding.outcome == "passed"
            yield from (f"{trial.case}, {check}: {fault}" for fault in finding.faults)
    assert compared, f"nothing was compared of {name}"
