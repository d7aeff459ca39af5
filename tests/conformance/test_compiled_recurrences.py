"""The CPU's compiled ops of layers with a state pass the kit: inputs that lie apart, replays, and the rest."""

from __future__ import annotations

import pytest

from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.site import Site
from tests.conformance.trying import first_failure, subject
from tests.cpu.building import needs_kernels

needs_kernels()
OPS = ("causal_conv", "gated_rms_norm", "linear_recurrence_chunks", "linear_recurrence_step", "recurrence_gates")


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
@pytest.mark.parametrize("of", OPS)
def test_passes(site: Site, every: int, of: str) -> None:
    from hardpoint_cpu.ops import recurrence

    claims = [{"dtype": ["float32", "float16", "bfloat16"]}]
    tried = subject(site, getattr(recurrence, of), "op", of, requires=claims)
    caught = first_failure(tried, OpTrials(), every=every)
    assert caught is None, str(caught)
