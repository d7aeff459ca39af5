"""Fixtures of the tests of compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu.building import levels


@pytest.fixture(params=levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level of this CPU and build in turn, in use."""
    from hardpoint_cpu import _native

    before = _native.level()
    _native.set_level(request.param)
    yield request.param
    _native.set_level(before)
