"""The entry point ``hardpoint``: one list of commands, one way to report errors."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, TextIO

from hardpoint.startup_times import mark

mark("interpreter")

import click  # noqa: E402  # counted as part of the command line, not of the interpreter

from hardpoint.cli.log import show_log  # noqa: E402
from hardpoint.terminal.lazy import HELP_OPTIONS, Lazy, LazyGroup  # noqa: E402
from hardpoint.thread_waiting import wait_briefly  # noqa: E402

_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
"""Errors of writing to an open stream; opening a file fails with others, and names the file."""

COMMANDS = {
    "generate": Lazy("hardpoint.cli.generate:generate", "Continue prompts with a model."),
    "serve": Lazy("hardpoint.cli.serve:serve", "Serve a model over HTTP."),
    "run-batch": Lazy("hardpoint.cli.run_batch:run_batch", "Answer a file of requests, in OpenAI's batch format."),
    "explain": Lazy("hardpoint.cli.explain:explain", "Show which implementation serves what, and why not the others."),
    "plugins": Lazy("hardpoint.cli.plugins:plugins", "List plugins; check, lock, write and compare them."),
    "ops": Lazy("hardpoint.cli.ops:ops", "List ops and their implementations."),
    "conform": Lazy("hardpoint.cli.conform:conform", "Prove a plugin's kernels, case by case."),
    "merge-certificates": Lazy("hardpoint.cli.conform:merge_certificates", "Join the certificates of a run's shards."),
    "bench": Lazy("hardpoint.cli.bench:bench", "Measure speed, beside the hardware's limit and another engine."),
    "calibrate": Lazy("hardpoint.cli.calibrate:calibrate", "Write scales for a KV cache of 8 or 4 bits."),
    "tune": Lazy("hardpoint.cli.tune:tune", "Measure kernels on this device, and save the fastest."),
    "env": Lazy("hardpoint.cli.env:env", "Report versions, devices and what is missing."),
}


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from hardpoint import __version__

        click.echo(f"hardpoint {__version__}")
        ctx.exit()


cli = LazyGroup(
    "hardpoint",
    COMMANDS,
    help="Hardpoint: LLM inference whose hardware support is plugged in.",
    params=[
        click.Option(["--debug"], is_flag=True, help="Show the traceback of every error."),
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Show the version.",
        ),
    ],
    elsewhere={name: f"plugins {name}" for name in ("doctor", "list", "lock", "new", "verify")},
    context_settings={"help_option_names": HELP_OPTIONS},
    callback=lambda debug: None,
    no_args_is_help=True,
)


def main() -> NoReturn:
    """Run the command line of this process."""
    wait_briefly()
    if sys.stderr is None:  # closed by the caller (2>&-): what would go there goes nowhere
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open as long as the process runs
    if sys.stdout is None:
        _report("stdout is closed; to discard the output, send it to /dev/null")
        sys.exit(1)
    show_log(logging.WARNING)
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run ``args`` and return the exit code: 0; 1 where output cannot be written; 2 for bad input; 130 if interrupted.

    Bad input, and output that cannot be written, is one message on stderr; a reader that left early hears nothing.
    A bug keeps its traceback.
    """
    try:
        code = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output (head, less) has enough
        _discard(sys.stdout)
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS or "--debug" in args[:1]:
            raise
        _discard(sys.stdout)
        with suppress(OSError):  # it may be stderr that is full
            _report(f"the output cannot be written: {error.strerror}")
        return 1
    return code


def _run(args: Sequence[str]) -> int:
    try:
        result = cli.main(list(args), prog_name="hardpoint", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"\nTry '{context.command_path} --help'." if context else ""
        return _report(error.format_message() + hint)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except Exception as error:
        from hardpoint_plugin_api import HardpointError

        if not isinstance(error, HardpointError) or "--debug" in args[:1]:
            raise
        return _report(str(error))
    return result if isinstance(result, int) else 0


def _discard(stream: TextIO) -> None:
    """Send what is still buffered, and all that follows, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report(message: str) -> int:
    click.echo(f"hardpoint: error: {message}", err=True)
    return 2
