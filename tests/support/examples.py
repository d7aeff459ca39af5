"""How many examples a test of Hypothesis draws: ten times as many in ``make nightly``."""

from __future__ import annotations

from hypothesis import settings

DAY = 100
"""Hypothesis' own default, and ten times that by night: ``--hypothesis-profile=nightly``."""

settings.register_profile("nightly", max_examples=10 * DAY)


def examples(count: int) -> settings:
    """``count`` of them in the default suite, however long each takes."""
    return settings(max_examples=count * settings().max_examples // DAY, deadline=None)
