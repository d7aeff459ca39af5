"""The entry point ``hardpoint``: one list of commands, one way to report errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hardpoint.bench.stages import mark

mark("interpreter")

import click  # noqa: E402  # counted as part of the command line, not of the interpreter

from hardpoint.cli.lazy import Lazy, LazyGroup  # noqa: E402

COMMANDS = {
    "generate": Lazy("hardpoint.cli.generate:generate", "Continue prompts with a model."),
    "explain": Lazy("hardpoint.cli.explain:explain", "Show which implementation serves what, and why not the others."),
    "plugins": Lazy("hardpoint.cli.plugins:plugins", "List the installed plugins, broken ones too."),
    "ops": Lazy("hardpoint.cli.ops:ops", "List ops and their implementations."),
    "bench": Lazy("hardpoint.cli.bench:bench", "Measure, beside the roofline and a peer."),
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
    callback=lambda debug: None,
    no_args_is_help=True,
)


def main() -> NoReturn:
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run ``args`` and return the exit code: 0; 1 where nobody reads the output; 2 for bad input; 130 if interrupted.

    Bad input is one message on stderr. A bug keeps its traceback.
    """
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
    except BrokenPipeError:  # the reader of our output (head, less) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return 1
    except Exception as error:
        from hardpoint_plugin_api import HardpointError

        if not isinstance(error, HardpointError) or "--debug" in args[:1]:
            raise
        return _report(str(error))
    return result if isinstance(result, int) else 0


def _report(message: str) -> int:
    click.echo(f"hardpoint: error: {message}", err=True)
    return 2
