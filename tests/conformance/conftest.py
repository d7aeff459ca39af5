"""One site for all planted faults: the CPU, with one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hardpoint.conformance.site import Site
from hardpoint.plugins import discover


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The CPU platform."""
    threads = torch.get_num_threads()
    yield Site.open(discover(), "cpu", {"cpu": {"threads": 1}})
    torch.set_num_threads(threads)
