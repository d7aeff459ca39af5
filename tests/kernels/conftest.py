"""Kernels in Triton run in its interpreter here, or on the accelerator of a machine that has one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = INSTALLED and not torch.accelerator.is_available()

if INTERPRETED:
    from tests.kernels.interpreter import interpret

    interpret()


class _NotInstalled(pytest.Module):
    """A module of tests that cannot be imported."""

    def collect(self) -> Any:
        pytest.skip("triton is not installed; `make test` installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip whole modules where they could not be imported."""
    return None if INSTALLED else _NotInstalled.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Silence numpy's warnings about numbers that are not finite: it computes for the interpreter."""
    item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True)
def _right_machine(request: pytest.FixtureRequest) -> None:
    if INSTALLED and not INTERPRETED and request.node.get_closest_marker("accelerator") is None:
        pytest.skip("kernels are compiled on this machine, and this test interprets them on the host")
