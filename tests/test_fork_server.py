"""Processes that are forked from a server: they are as if they had been spawned, and end as they would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from hardpoint import fork_server
from tests.support.engines import until
from tests.support.fork_targets import MODULES, leave, register, say, start_another, wait_for_a_word
from tests.support.processes import is_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are spawned")


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[fork_server._Key, fork_server._Server]]:
    """No servers but those of this test, which end with it."""
    found: dict[fork_server._Key, fork_server._Server] = {}
    monkeypatch.setattr(fork_server, "_servers", found)
    yield found
    for server in found.values():
        server.stop()


def told(target: object, *defaults: tuple[str, str]) -> dict[str, object]:
    ours, theirs = Pipe()
    process = fork_server.start(target, (theirs,), "child", MODULES, dict(defaults))  # type: ignore[arg-type]
    theirs.close()
    found: dict[str, object] = ours.recv()
    process.join()
    assert process.exitcode == 0
    return found


def test_a_child_has_what_its_parent_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told(say)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "71")
    with fork_server.signals_held():
        found = told(say, ("HP_DEFAULT", "given"))
    assert found["parent"] != os.getpid()
    assert found["imported"]
    assert (found["late"], found["default"]) == ("71", "given")
    assert found["folder"] == str(tmp_path)
    assert str(tmp_path) in found["path"]  # type: ignore[operator]
    assert found["held"] == set(fork_server.GROUP_SIGNALS)
    assert told(say)["held"] == set()
    assert found["interrupt"] == signal.default_int_handler
    assert "HP_DEFAULT" not in os.environ
    assert capfd.readouterr().out == "printed by the child\n" * 3


@pytest.mark.nightly
def test_equal_environments_share_a_server_and_its_childrens_children_do(
    monkeypatch: pytest.MonkeyPatch, servers: dict[fork_server._Key, fork_server._Server]
) -> None:
    first = told(say)
    assert told(start_another)["parent"] == told(say)["parent"] == first["parent"]
    monkeypatch.setenv("HP_VARIABLE", "2")
    other = told(say)
    assert other["variable"] == "2"
    assert other["parent"] != first["parent"]
    assert len(servers) == 2


def test_a_program_that_changes_its_environment_keeps_few_servers(
    monkeypatch: pytest.MonkeyPatch, servers: dict[fork_server._Key, fork_server._Server]
) -> None:
    """Servers that have children are not ended: a process is spawned in place of that."""
    pipes = [Pipe() for _ in range(fork_server._MOST_SERVERS)]
    held: list[BaseProcess] = []
    for number, (_, theirs) in enumerate(pipes):
        monkeypatch.setenv("HP_VARIABLE", str(number))
        held.append(fork_server.start(wait_for_a_word, (theirs,), "child", MODULES))
    pids = [server._forkserver_pid for server in servers.values()]
    monkeypatch.setenv("HP_VARIABLE", "one more")
    found = told(say)
    assert (found["parent"], found["variable"]) == (os.getpid(), "one more"), "spawned"
    for ours, _ in pipes:
        ours.send("go")
    for process in held:
        process.join()
        assert process.exitcode == 0
    assert told(say)["parent"] not in [*pids, os.getpid()]
    assert len(servers) == fork_server._MOST_SERVERS
    # The first that is seen to be idle: a server may take a moment to notice that its child has ended.
    assert [is_gone(pid) for pid in pids if pid is not None].count(True) == 1


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL, -signal.SIGSEGV])
def test_the_way_in_which_a_child_ended_is_known(code: int) -> None:
    process = fork_server.start(leave, (code,), "child", MODULES)
    process.join()
    assert process.exitcode == code


def test_a_server_that_was_killed_is_replaced(servers: dict[fork_server._Key, fork_server._Server]) -> None:
    first = told(say)["parent"]
    assert isinstance(first, int)
    os.kill(first, signal.SIGKILL)
    until(lambda: is_gone(first))
    assert told(say)["parent"] not in (first, os.getpid())


def test_a_child_runs_its_exit_handlers() -> None:
    ours, theirs = Pipe()
    process = fork_server.start(register, (theirs,), "child", MODULES)
    theirs.close()
    assert ours.recv() == "at exit"
    process.join()
    assert process.exitcode == 4


PROGRAM = """
import os, signal, sys, time
from hardpoint import fork_server

def child():
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    process = fork_server.start(child, (), "child", ("colorsys",))
    os.kill(process.pid, 0)
    sys.stdin.read()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_server_ends_after_its_program_and_its_children(tmp_path: Path, killed: bool) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        server, child = map(int, program.stdout.readline().split())
        for each in fork_server.GROUP_SIGNALS:
            os.kill(server, each)  # as a terminal or a service manager does
        if killed:
            program.kill()
            program.wait()
            assert not is_gone(server)
            os.kill(child, signal.SIGKILL)
        else:
            program.communicate("")
    until(lambda: is_gone(child) and is_gone(server))


def test_what_engines_preload_starts_no_threads_and_opens_no_device() -> None:
    """Of its own; OpenBLAS's threads end before a fork."""
    code = (
        "import os, sys, torch, hardpoint.engine.processes.preloaded\n"
        "assert len(os.listdir('/proc/self/task')) == 1, os.listdir('/proc/self/task')\n"
        "assert not torch.accelerator.is_available() or not torch.get_device_module().is_initialized()\n"
        "assert 'numpy.random' not in sys.modules, 'children would share the state of its generator'\n"
        "assert not [name for name in sys.modules if name.startswith('hardpoint_') and 'plugin_api' not in name]\n"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
