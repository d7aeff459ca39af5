"""The entry point: what it costs, how it reports errors, and its exit codes."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Sequence

import click
import pytest

from hardpoint.cli import main as main_module
from hardpoint.cli.main import COMMANDS, cli, run
from hardpoint.terminal.lazy import Lazy
from hardpoint_plugin_api import HardpointError

HEAVY = ("torch", "transformers", "pydantic", "tokenizers", "numpy", "jinja2")


def modules_after(args: Sequence[str]) -> set[str]:
    """The modules that a process which ran ``args`` had imported."""
    code = "import sys; from hardpoint.cli.main import run; run(sys.argv[1:]); print('|'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split("|"))


def test_help_imports_next_to_nothing() -> None:
    assert not modules_after(["--help"]) & {*HEAVY, "rich", "hardpoint_plugin_api"}


@pytest.mark.parametrize("args", [["plugins", "list"], ["ops", "list"], ["bench", "--help"], ["bench"]])
def test_listing_imports_nothing_heavy(args: list[str]) -> None:
    assert not modules_after(args) & set(HEAVY)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: hardpoint {name}" in shown
    assert run([name, "-h"]) == 0
    assert capsys.readouterr().out == shown


def test_a_command_that_was_parsed_alone_keeps_both_help_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Click makes that option once, as the first context says."""
    from hardpoint.cli.serve import serve

    serve._help_option = None
    serve.make_context("serve", ["demo"])
    assert run(["serve", "-h"]) == 0
    assert "Usage: hardpoint serve" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import hardpoint

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"hardpoint {hardpoint.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["genrate"], "unknown command 'genrate'; did you mean 'generate'"),
        (["bench", "startpu"], "unknown command 'startpu'; did you mean 'startup'"),
        (["--vesion"], "--version"),
        (["generate", "--blok-size", "3"], "--block-size"),
        (["plugins", "lst"], "lst"),
        (["doctor"], "It is 'hardpoint plugins doctor'"),
    ],
)
def test_a_misspelt_word_is_one_error_with_the_nearest(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hardpoint: error: ")
    assert message in printed.err


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().out


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Add the command ``boom``, which raises ``error``."""

    @click.command()
    def boom() -> None:
        raise error

    monkeypatch.setattr(main_module, "_boom", boom, raising=False)
    monkeypatch.setitem(cli._entries, "boom", Lazy("hardpoint.cli.main:_boom", ""))


def test_expected_errors_are_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, HardpointError("the pool is empty; fill it"))
    assert run(["boom"]) == 2
    assert capsys.readouterr().err == "hardpoint: error: the pool is empty; fill it\n"
    with pytest.raises(HardpointError):
        run(["--debug", "boom"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        run(["boom"])


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert run(["boom"]) == 130


@pytest.mark.parametrize("args", ["--help", "ops list", "plugins list --json"])
def test_a_reader_that_leaves_early_hears_nothing(args: str) -> None:
    command = f"{sys.executable} -m hardpoint.cli {args} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run ``hardpoint`` in a shell, which closes and redirects."""
    command = f"{sys.executable} -m hardpoint.cli {line}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


GENERATE = "generate --platform cpu --kv-cache-memory 16MiB --max-tokens 2"


@pytest.mark.parametrize(
    "line", ["--help", "ops list", "env", "plugins list --json", f"{GENERATE} --prompt a --quiet", ""]
)
def test_output_that_cannot_be_written_is_one_line(line: str) -> None:
    done = shell(f"{line} >/dev/full")
    assert (done.returncode, done.stderr) == (
        1,
        "hardpoint: error: the output cannot be written: No space left on device\n",
    )


def test_a_closed_stdout_is_refused() -> None:
    done = shell("env >&-")
    assert done.returncode == 1
    assert done.stderr == "hardpoint: error: stdout is closed; to discard the output, send it to /dev/null\n"


def test_a_closed_stderr_loses_only_what_would_go_there() -> None:
    pytest.importorskip("hardpoint_cpu")
    for options in ("--prompt a", "--prompt a --prompt b"):
        done = shell(f"{GENERATE} {options} 2>&-")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


def test_a_closed_stdin_is_one_error() -> None:
    done = shell(f"{GENERATE} <&-")
    assert done.returncode == 2
    assert done.stderr.startswith("hardpoint: error: stdin is closed")


def test_an_os_error_that_is_not_the_outputs_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(errno.ENOSPC, "a bug", "model.bin"), OSError(errno.ENOTDIR, "a bug")):
        raising(monkeypatch, error)
        with pytest.raises(OSError, match="a bug"):
            run(["boom"])
