"""The options of the conformance kit for pytest; the kit itself is imported where ``--hardpoint-plugin`` asks for it.

pytest loads this module in every repository where core is installed, so it imports nothing of Hardpoint.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; without --hardpoint-plugin, they do nothing."""
    group = parser.getgroup("hardpoint", "Hardpoint's conformance kit")
    group.addoption("--hardpoint-plugin", metavar="NAME", help="Collect the conformance cases of this plugin.")
    group.addoption(
        "--hardpoint-level",
        choices=("quick", "full", "exhaustive"),
        default="quick",
        help="Level of the kit: quick, full or exhaustive (default: quick).",
    )
    group.addoption("--hardpoint-seed", type=int, default=0, metavar="SEED", help="Seed of the inputs.")
    group.addoption(
        "--hardpoint-family", metavar="FAMILY", help="Family whose contributions are tested (default: all)."
    )
    group.addoption("--hardpoint-name", metavar="NAME", help="Name of the contribution to test (default: all).")
    group.addoption(
        "--hardpoint-platform", metavar="NAME", help="Platform to run on (default: the first that the plugin names)."
    )
    group.addoption(
        "--hardpoint-timeout", type=float, metavar="S", help="Seconds that one case may take (default: 300)."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the kit's hooks where the kit is asked for."""
    if config.getoption("hardpoint_plugin"):
        from hardpoint.conformance import pytest_cases

        config.pluginmanager.register(pytest_cases, "hardpoint-conformance")
