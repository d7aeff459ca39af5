"""``hardpoint run-batch``: a file of requests answered, without a server."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import click

from hardpoint.cli.log import show_log
from hardpoint.config import EngineConfig
from hardpoint.extras import require_extra
from hardpoint.terminal.engine_options import EngineCommand
from hardpoint_plugin_api import ConfigError


@click.command("run-batch", cls=EngineCommand, title="Batch", short_help="Answer a file of requests.")
@click.option("--input-file", "-i", default="-", metavar="FILE", help="Requests, a line of JSON each. Default: stdin.")
@click.option("--output-file", "-o", default="-", metavar="FILE", help="Answers, a line of JSON each. Default: stdout.")
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    metavar="NAME",
    help="Name that requests of the batch may give the model. Repeatable.",
)
@click.option(
    "--max-concurrent-requests",
    type=int,
    default=1024,
    show_default=True,
    help="Largest number of requests in flight.",
)
def run_batch(
    config: EngineConfig,
    input_file: str,
    output_file: str,
    served_model_names: tuple[str, ...],
    max_concurrent_requests: int,
) -> int:
    """Answer requests of OpenAI's batch format with MODEL: a folder, a GGUF file, a hub id, or the built-in demo.

    Answers are written as they come; custom_id tells to which request one belongs. The exit code is 1 where a request
    has an error.
    """
    require_extra("serve", "hardpoint run-batch")
    from hardpoint.server.batch import run_batch as run
    from hardpoint.server.settings import ServerSettings

    show_log(logging.WARNING)
    settings = ServerSettings(
        served_model_names=served_model_names, max_concurrent_requests=max_concurrent_requests, response_store_bytes=0
    )
    with ExitStack() as stack:
        source = sys.stdin if input_file == "-" else _opened(stack, "--input-file", input_file, "r")
        target = sys.stdout if output_file == "-" else _opened(stack, "--output-file", output_file, "w")
        result = asyncio.run(run(config, settings, source, target))
    click.echo(f"{result.num_requests} requests, {result.num_errors} with an error", err=True)
    return int(result.num_errors > 0)


def _opened(stack: ExitStack, flag: str, file: str, mode: str) -> TextIO:
    """A text file. Raises ConfigError, naming its flag."""
    try:
        opened = Path(file).expanduser().open(mode, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from error
    return stack.enter_context(opened)  # type: ignore[return-value]  # text, by its mode
