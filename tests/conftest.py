"""Rules and fixtures of every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded, here and in every process that a test starts: threads of OpenMP that wait for work leave the
# core to others. Several processes share few cores here, and threads that spin made some tests 40 times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Hundreds of child processes import core, and rewriting the asserts of all tests takes ten seconds. Where bytecode may
# not stand beside the sources, it is kept elsewhere.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path.home() / ".cache" / "hardpoint-tests" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import pytest

import tests.support.examples  # noqa: F401  # has the profile of nightly runs
from hardpoint.plugin_host import discover
from tests.support.freed_memory import keep_freed_memory

OURS = {"core", "cpu", "cuda", "rocm", "xpu", "sim"}  # sim: the simulated accelerator, in child processes

LONGEST = ("tests/engine/test_simulated_device.py", "tests/docs/test_docs.py")
"""Files whose tests start long child processes: one that began last would keep a run from ending."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collections, and keep them off what is there then: a million objects that all stay.

    Tests make a collection for each 20,000 objects, not for each 700: engines live long, and those took a twelfth of
    the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest; all others keep their order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are as wide as they are: processes of a parallel run are told the width of its terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pytest_configure() -> None:
    """Let interrupts through, keep freed memory, and refuse an environment with other plugins in it.

    A shell has its background jobs ignore interrupts, and so what they start: no test of one could pass. Tests say
    which kernels win, and other plugins would change that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_freed_memory()
    others = sorted(record.name for record in discover(quiet=True).records if record.name not in OURS)
    if others:
        raise pytest.UsageError(
            f"other plugins are installed in this environment: {', '.join(others)}; run the tests in one without them"
        )
