"""Fixtures of the tests of compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hardpoint_cpu import compiled


def _levels() -> list[str]:
    if compiled.missing():
        return []
    from hardpoint_cpu import _native

    return _native.levels()


@pytest.fixture(params=_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level of this CPU and build in turn, in use."""
    from hardpoint_cpu import _native

    before = _native.level()
    _native.set_level(request.param)
    yield request.param
    _native.set_level(before)
