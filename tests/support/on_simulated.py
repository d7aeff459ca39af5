"""A pytest plugin: ``small_llm`` makes engines on the simulated accelerator. For child processes; see simulated.py."""

from __future__ import annotations

import pytest

from tests.support import engines

_BYTES = "it counts the bytes of another layout's pages"
_LIMITS = "it counts by the limits of the CPU's platform; this one has its own"
NOT_FOR_IT = {
    "test_a_request_that_can_never_fit": _BYTES,
    "test_a_size_asked_for_is_taken_whole": _BYTES,
    "test_layers_of_all_groups_share_the_pool": _BYTES,
    "test_windows_free_their_pages": _BYTES,
    "test_a_platforms_step_limits_are_kept": _LIMITS,
    "test_memory_that_is_gone": "it makes tensors that cannot be allocated; here the device takes a tag's memory back",
    "test_the_engine_counts_what_it_does": _BYTES,
    "test_padding_is_reported": _LIMITS,
    "test_a_plugin_counts_and_marks": _LIMITS,
    "test_nothing_is_marked_while": "it watches the CPU's platform",
    "test_steps_that_verify": "a plan of several backends is captured for single tokens alone",
    "test_steps_are_submitted_before_their_drafts_are_known[native]": "its attention plans by exact lengths",
    "test_a_platform_that_separates_phases": _LIMITS,
    "test_speculation.py::test_two_ranks": "it is one device",
    "test_leaving_a_stream_frees_its_pages": "a page stays until the step that is under way has ended",
}
"""Part of a test's id -> why the test says nothing about this device."""


def pytest_configure() -> None:
    engines.SMALL.update(platform="sim", plugin_config={})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, reason in NOT_FOR_IT.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
