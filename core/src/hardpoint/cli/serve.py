"""``hardpoint serve``: an engine behind HTTP."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from hardpoint.cli.log import show_log
from hardpoint.config import EngineConfig
from hardpoint.extras import require_extra
from hardpoint.terminal.engine_options import EngineCommand


@click.command(cls=EngineCommand, short_help="Serve a model over HTTP.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0 for a free one.")
@click.option("--api-key", "api_keys", multiple=True, metavar="KEY", help="Serve only who sends it; repeatable.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="File of such keys, one on each line."
)
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    metavar="NAME",
    help="What clients call the model; repeatable.  [default: MODEL]",
)
@click.option(
    "--max-concurrent-requests", type=int, default=1024, show_default=True, help="Requests answered at a time."
)
@click.option("--max-body-bytes", type=int, default=8 * 2**20, show_default=True, help="Largest body of a request.")
@click.option(
    "--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN", help="Let web pages of it ask; repeatable."
)
@click.option(
    "--shutdown-deadline",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds that open requests have once the server is told to stop.",
)
@click.option(
    "--head-timeout", type=float, default=20.0, show_default=True, help="Seconds in which a head must have arrived."
)
@click.option(
    "--body-timeout", type=float, default=60.0, show_default=True, help="Seconds in which a body must have arrived."
)
@click.option(
    "--write-timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds after which a client that takes nothing of its answer is left.",
)
@click.option(
    "--allow-lora-updating",
    is_flag=True,
    help="Let clients load LoRA adapters from this machine's disk, and unload them.",
)
@click.option("--access-log", is_flag=True, help="Log every request.")
@click.option("--quiet", is_flag=True, help="Log warnings alone.")
def serve(config: EngineConfig, api_key_file: Path | None, quiet: bool, **settings: Any) -> None:
    """Serve MODEL over HTTP, by OpenAI's and Anthropic's protocols: a folder, a hub id, or the built-in demo model.

    Says on stderr where it listens. SIGTERM or Ctrl-C ends it; a second one at once.
    """
    require_extra("serve", "hardpoint serve")
    from hardpoint.server.run import serve as run
    from hardpoint.server.settings import ServerSettings, read_api_keys

    show_log(logging.WARNING if quiet else logging.INFO)
    if api_key_file is not None:
        settings["api_keys"] += read_api_keys(api_key_file)
    run(config, ServerSettings(**settings))
