"""One-time logs belong to an owner."""

from __future__ import annotations

import gc
import logging

import pytest

from hardpoint import logs

logger = logging.getLogger(__name__)


class Owner:
    """Anything that can be referred to weakly."""


def test_once_per_owner_and_key(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Owner(), Owner()
    for owner in (first, first, second):
        for key in ("a", "b"):
            logs.log_once(logger, logging.WARNING, key, f"100% {key}", owner)
    assert [r.message for r in caplog.records] == ["100% a", "100% b"] * 2
    assert {r.filename for r in caplog.records} == {"test_log_once.py"}


def test_the_memory_ends_with_its_owner() -> None:
    gc.collect()  # owners of other tests may be left in cycles
    before, owner = len(logs._logged), Owner()
    logs.log_once(logger, logging.INFO, "key", "text", owner)
    assert len(logs._logged) == before + 1
    del owner
    gc.collect()
    assert len(logs._logged) == before
