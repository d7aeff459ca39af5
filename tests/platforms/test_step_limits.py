"""StepLimits.intersect: what satisfies both parties, or an error that names both."""

from __future__ import annotations

import pytest

from hardpoint_plugin_api import PlatformError, StepLimits


def test_no_limits_are_neutral() -> None:
    limits = StepLimits(8192, 256, 32768, chunk_multiple=16, mixed_phases=False, token_buckets=(8, 16))
    assert limits.intersect(StepLimits()) == limits
    assert StepLimits().intersect(limits) == limits


def test_the_smaller_maximum_holds() -> None:
    one = StepLimits(max_tokens=8192, max_requests=None, max_context=100)
    other = StepLimits(max_tokens=4096, max_requests=64, max_context=200)
    assert one.intersect(other) == StepLimits(max_tokens=4096, max_requests=64, max_context=100)


def test_phases_mix_only_where_both_allow_it() -> None:
    assert not StepLimits().intersect(StepLimits(mixed_phases=False)).mixed_phases


def test_chunk_multiples_must_divide_one_another() -> None:
    assert StepLimits(chunk_multiple=16).intersect(StepLimits(chunk_multiple=64)).chunk_multiple == 64
    with pytest.raises(PlatformError, match="16 and 24"):
        StepLimits(chunk_multiple=24).intersect(StepLimits(chunk_multiple=16))


def test_unlike_buckets_are_refused() -> None:
    assert StepLimits(token_buckets=(8, 16)).intersect(StepLimits(token_buckets=(8, 16))).token_buckets == (8, 16)
    with pytest.raises(PlatformError, match=r"\(8,\) and \(16,\)"):
        StepLimits(token_buckets=(8,)).intersect(StepLimits(token_buckets=(16,)))
