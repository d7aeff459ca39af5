"""One server for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.serving import RunningServer, running_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with running_server("--tool-parser", "hermes", "--log-requests") as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; whatever a test asked of it has ended when the next one begins."""
    yield shared_server
    assert shared_server.process.poll() is None, "".join(shared_server.log)
    shared_server.wait_until_idle()
