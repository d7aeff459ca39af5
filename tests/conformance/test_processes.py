"""Processes for trials: kernels that fall, leave or hang, interrupts, kills, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hardpoint.conformance.certify import certify
from hardpoint.conformance.kit import Order, Shard
from hardpoint.plugin_host import discover
from tests.support import simulated
from tests.support.forked import run_module

ONE_THREAD = {"cpu": {"threads": 1}}
_SECONDS = 120.0
"""Time limit of anything here on a busy machine."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found by way of /proc")


def parents() -> dict[int, int]:
    """Process -> parent, of all that run; what has ended and is not yet collected is left out."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if state != "Z":
                found[int(folder.name)] = int(parent)
    return found


def below(process: int) -> list[int]:
    """The processes that ``process`` started, and those that they did."""
    known, found = parents(), [process]
    for each in found:
        found += [child for child, parent in known.items() if parent == each]
    return found[1:]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not come to it"
        time.sleep(0.02)


def start(*arguments: str) -> subprocess.Popen[str]:
    code = "from hardpoint.cli.main import main; main()"
    command = [sys.executable, "-c", code, "conform", "tried", "--setting", "cpu.threads=1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hanging(marks: Path, cases: str = "*/odd") -> tuple[subprocess.Popen[str], list[int]]:
    """A run whose kernel hangs, and all processes that it has started."""
    run = start("--name", "tried_hangs", "--case", cases)
    until(lambda: bool(list(marks.iterdir())) or run.poll() is not None)
    assert run.poll() is None, run.communicate()[1]
    return run, below(run.pid)


@pytest.fixture
def marks(tried_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernel that hangs leaves a file once it does."""
    monkeypatch.setenv("TRIED_MARKS", str(tmp_path))
    return tmp_path


def ended(processes: Sequence[int]) -> bool:
    return not set(processes) & parents().keys()


def test_the_kit_itself_needs_no_torch() -> None:
    """The process that trials are forked from imports it; the command and the pytest plugin only read results."""
    modules = "hardpoint.conformance.certify, hardpoint.conformance.pytest_cases, hardpoint.cli.conform"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)


def test_an_interrupt_is_one_line_tells_what_was_found_and_leaves_nothing_running(marks: Path) -> None:
    run, started = hanging(marks, "*/[or]*")
    assert len(started) >= 5  # the nursery, a guardian, the trials, and what the kernel has started, one in a session
    run.send_signal(signal.SIGINT)
    out, errors = run.communicate(timeout=_SECONDS)
    assert run.returncode == 130
    begun, *ended_by = errors.strip().splitlines()
    assert begun == "hardpoint: op rms_norm: tried_hangs: 3 cases"
    assert ended_by == ["hardpoint: interrupted; nothing is certified"]
    assert "tried, up to the interrupt" in out
    assert "tried_hangs" in out
    until(lambda: ended(started))


def test_a_killed_run_leaves_nothing_running(marks: Path) -> None:
    run, started = hanging(marks)
    run.kill()
    run.communicate(timeout=_SECONDS)
    until(lambda: ended(started))


def test_a_killed_process_is_a_failure_of_its_case(marks: Path) -> None:
    run, started = hanging(marks)
    os.kill(int(next(marks.iterdir()).name), signal.SIGKILL)
    out, errors = run.communicate(timeout=_SECONDS)
    assert run.returncode == 1
    assert "the process ended (signal SIGKILL)" in " ".join(out.split())
    assert "1 failed: tried_hangs" in out
    assert errors.splitlines() == ["hardpoint: op rms_norm: tried_hangs: 1 cases"]
    until(lambda: ended(started))


def test_whatever_ends_a_process_is_a_failure_of_its_case(tried_plugin: Path) -> None:
    found = certify(discover(), Order("tried", name="tried_falls", settings=ONE_THREAD))
    failed = {r.case: r.faults[0] for r in found.results if r.outcome == "failed"}
    ways = {"odd": "signal SIGSEGV", "long": "exit code 3", "heads": "exit code 0", "peaked": "exit code 4"}
    ways["width_8192"] = ways["long"]  # as wide
    assert failed.keys() == {f"float32/{case}" for case in ways}
    for case, says in ways.items():
        fault = failed[f"float32/{case}"]
        assert fault.code == "crash"
        assert f"the process ended ({says})" in fault.message
    assert {r.case for r in found.results if r.outcome == "passed"} >= {"float32/random", "float32/non_finite"}


def test_what_trials_are_forked_from_asks_for_no_device() -> None:
    """A process that is forked after CUDA was asked for, be it only whether it is there, cannot use it."""
    code = """
import torch
def asked(*_): raise AssertionError("asked for a device")
torch.cuda.is_available = torch.cuda.device_count = asked
torch.xpu.is_available = torch.accelerator.is_available = torch.accelerator.device_count = asked
import hardpoint.conformance.nursery
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr


def test_contributions_at_once_find_what_they_find_one_by_one(tried_plugin: Path) -> None:
    """Shards are cut from the list of all contributions' cases, so they show whether that is counted in order."""
    order = Order("tried", settings=ONE_THREAD, shard=Shard(2, 4), case="*/[rz]*")
    found = [certify(discover(), order, jobs=jobs) for jobs in (1, 4, 12)]  # the last: several for each contribution
    one, *several = [
        [(r.contribution, r.case, r.check, r.outcome) for r in each.results if r.check in ("values", "load")]
        for each in found
    ]
    assert several == [one, one]
    assert {"tried_wrong", "tried_missing"} <= {name for (_, _, name), *_ in one}
    assert len({each.case_list for each in found}) == 1


ASKED = """
import os, sys, torch
from hardpoint.conformance.worker import serve
torch.set_num_threads(2)
(questions, asked), answers = os.pipe(), os.open(os.devnull, os.O_WRONLY)
os.close(asked)
order = {"plugin": "core", "family": "op", "of": "rms_norm", "name": "reference", "platforms": [sys.argv[1]]}
order |= {"level": "quick", "seed": 0, "settings": {"cpu": {"threads": 2}}, "threads": 1, "arrays": {}}
serve({**order, "questions": questions, "answers": answers})
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(("platform", "threads"), [("sim", 1), ("cpu", 2)])
def test_beside_a_device_processes_share_the_hosts_threads(tmp_path: Path, platform: str, threads: int) -> None:
    """On the host itself threads are the platform's, which kernels are tried with."""
    (tmp_path / "asked.py").write_text(ASKED, encoding="utf-8")
    done = run_module("asked", [platform], tmp_path, _SECONDS, simulated.environment(simulated.installed()))
    assert done.stdout.split() == [str(threads)], done.stdout
