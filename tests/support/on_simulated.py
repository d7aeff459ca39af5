"""A pytest plugin: ``small_llm`` makes engines on the simulated accelerator. For child processes; see simulated.py."""

from __future__ import annotations

import pytest

from tests.support import engines

NOT_FOR_IT: dict[str, str] = {}
"""Part of a test's id -> why the test says nothing about this device."""


def pytest_configure() -> None:
    engines.SMALL.update(platform="sim", plugin_config={})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, reason in NOT_FOR_IT.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
