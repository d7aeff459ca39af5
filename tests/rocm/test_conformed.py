"""The conformance kit on AITER's kernels, through the stand-in."""

from __future__ import annotations

import pytest

from tests.support.conformed import faults

SOME = pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])


@SOME
@pytest.mark.parametrize("name", ["aiter_flash", "aiter_paged", "aiter_unified", "aiter_latent"])
def test_nothing_is_found(aiter: None, mi300x: None, name: str, every: int) -> None:
    assert not list(faults("rocm", name, every))


@SOME
def test_what_is_found_of_the_shuffled_layout(aiter: None, mi300x: None, every: int) -> None:
    """The kit's odd scale of scores multiplies queries, which are rounded to 16 bits: its bound for sums shows that."""
    assert not list(faults("rocm", "aiter_shuffled", 1, "layout/*"))
    found = faults("rocm", "aiter_shuffled", every, "*/kv-*float16/*")
    assert not [fault for fault in found if not fault.endswith("[accumulation]")]


def test_nothing_is_found_of_experts(aiter: None, mi300x: None) -> None:
    """Few trials have sizes that AITER takes; this is a part of them."""
    assert not list(faults("rocm", "aiter_fused", 1, "*x[12]/tiled/here/*"))


@SOME
def test_nothing_is_found_of_mxfp4(aiter: None, mi355x: None, every: int) -> None:
    assert not list(faults("rocm", "aiter_mxfp4", every))
