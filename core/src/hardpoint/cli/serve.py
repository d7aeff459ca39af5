"""``hardpoint serve``: an engine behind HTTP."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hardpoint.cli.log import show_log
from hardpoint.config import EngineConfig
from hardpoint.extras import require_extra
from hardpoint.terminal.engine_options import EngineCommand
from hardpoint_plugin_api import ConfigError

if TYPE_CHECKING:
    from hardpoint.server.settings import TlsSettings


@click.command(cls=EngineCommand, title="Server", short_help="Serve a model over HTTP.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. 0.0.0.0: all addresses.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on. 0: any free port.")
@click.option(
    "--uds",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Unix socket to listen on, in place of host and port. The file is created, and removed at the end.",
)
@click.option(
    "--root-path",
    default="",
    metavar="PATH",
    help="Path below which a proxy shows this server, such as /llm. Requests are answered with it and without.",
)
@click.option(
    "--ssl-certfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="PEM file with the server's certificate and the CA certificates of its chain. Enables TLS.",
)
@click.option(
    "--ssl-keyfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File (PEM) with the certificate's key.  [default: the certificate's file]",
)
@click.option(
    "--ssl-ca-certs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="PEM file with the CA certificates that clients' certificates are verified against.",
)
@click.option(
    "--ssl-cert-reqs",
    type=click.IntRange(0, 2),
    default=0,
    show_default=True,
    help="Whether clients need a certificate: 0 no, 1 optional, 2 yes.",
)
@click.option("--ssl-ciphers", metavar="LIST", help="OpenSSL's list of ciphers for TLS 1.2.  [default: Python's]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="API key that requests must carry. Repeatable: each key is valid. Default: requests need no key.",
)
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="File with one API key on each line."
)
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    metavar="NAME",
    help="Name of the model in requests and responses. Repeatable: requests may use each name, responses have the "
    "first.  [default: MODEL]",
)
@click.option(
    "--max-concurrent-requests",
    type=int,
    default=1024,
    show_default=True,
    help="Largest number of requests in flight. Further requests are refused with status 429.",
)
@click.option(
    "--api-server-count",
    type=int,
    default=1,
    show_default=True,
    help="Number of processes that answer HTTP. They share one engine.",
)
@click.option(
    "--api-server-timeout",
    "api_timeout",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds after which a process of --api-server-count that does not react is killed and replaced.",
)
@click.option("--max-body-bytes", type=int, default=8 * 2**20, show_default=True, help="Largest request body in bytes.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Allow web pages of this origin (https://page.example, or * for all) to call the server from a browser. "
    "Repeatable.",
)
@click.option(
    "--shutdown-deadline",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds that open requests may take to end after SIGTERM.",
)
@click.option(
    "--head-timeout",
    type=float,
    default=20.0,
    show_default=True,
    help="Seconds that a client may take to send the headers of a request.",
)
@click.option(
    "--body-timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds that a client may take to send the body of a request.",
)
@click.option(
    "--write-timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds after which a connection is closed whose client reads nothing of the response.",
)
@click.option(
    "--allow-lora-updating",
    is_flag=True,
    help="Let clients load LoRA adapters from this machine's disk, and unload them.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that requests may be sent to, beside localhost. Repeatable. Default: any; on a loopback address "
    "without keys, localhost alone.",
)
@click.option("--strict-fields", is_flag=True, help="Refuse requests with unknown fields, which are ignored otherwise.")
@click.option(
    "--min-priority",
    type=int,
    default=0,
    show_default=True,
    help="Lowest priority number that requests may have. Lower numbers run first; requests without one have 0.",
)
@click.option(
    "--allow-engine-control",
    is_flag=True,
    help="Let clients with a key have the engine sleep, wake up and forget cached prefixes, and see its settings.",
)
@click.option(
    "--mcp-allowed-host",
    "mcp_allowed_hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Host of MCP tool servers that requests to /v1/responses may name. Repeatable. Default: none. Needs the extra "
    "mcp.",
)
@click.option(
    "--mcp-timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds that an MCP server may take to list its tools, or to answer a call.",
)
@click.option(
    "--mcp-max-bytes", type=int, default=2**20, show_default=True, help="Largest answer of an MCP server in bytes."
)
@click.option(
    "--profile-folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder for profiles, which clients with a key begin by /start_profile and end by /stop_profile. Needs "
    "--allow-engine-control.",
)
@click.option(
    "--response-store",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="SQLite file that keeps the responses of /v1/responses.  [default: a file that is gone with the server]",
)
@click.option(
    "--response-store-bytes",
    type=int,
    default=2**28,
    show_default=True,
    help="Most bytes of responses that are kept; the least recently used go first. 0: none is kept.",
)
@click.option(
    "--response-store-hours",
    type=float,
    default=720.0,
    show_default=True,
    help="Hours since their last use for which responses are kept.",
)
@click.option(
    "--otlp-traces-endpoint",
    metavar="URL",
    help="URL that gets a span of OpenTelemetry for each generation (OTLP over HTTP), such as "
    "http://127.0.0.1:4318/v1/traces. Needs the extra otlp.",
)
@click.option(
    "--metrics-names",
    type=click.Choice(["hardpoint", "vllm"]),
    default="hardpoint",
    show_default=True,
    help="Names of metrics. vllm: vLLM's names for what vLLM has, too, so that dashboards made for it work.",
)
@click.option("--access-log", is_flag=True, help="Log path and status of every HTTP request.")
@click.option(
    "--log-requests", is_flag=True, help="Log a line for each generation: its request's id, its tokens and its seconds."
)
@click.option("--quiet", is_flag=True, help="Log warnings and errors only.")
def serve(config: EngineConfig, api_key_file: Path | None, quiet: bool, **settings: Any) -> None:
    """Serve MODEL over HTTP, by OpenAI's and Anthropic's protocols.

    MODEL is a folder, a GGUF file, a hub id, or the built-in demo.

    Prints its address to stderr. SIGTERM or Ctrl-C ends it after the open requests; a second signal ends it at once.
    """
    require_extra("serve", "hardpoint serve")
    if settings["otlp_traces_endpoint"] is not None:
        require_extra("otlp", "--otlp-traces-endpoint")
    if settings["mcp_allowed_hosts"]:
        require_extra("mcp", "--mcp-allowed-host")
    from hardpoint.server.run import serve as run
    from hardpoint.server.settings import ServerSettings, read_api_keys

    show_log(logging.WARNING if quiet else logging.INFO, waits=False)
    if api_key_file is not None:
        settings["api_keys"] += read_api_keys(api_key_file)
    run(config, ServerSettings(tls=_tls(settings), **settings))


def _tls(settings: dict[str, Any]) -> TlsSettings | None:
    """Take the settings of TLS (``ssl_*``) out of ``settings``; None without any."""
    from hardpoint.server.settings import TlsSettings

    given = {name: settings.pop(f"ssl_{name}") for name in ("certfile", "keyfile", "ca_certs", "cert_reqs", "ciphers")}
    if given["certfile"] is None:
        if name := next((name for name, value in given.items() if value), None):
            raise ConfigError(f"--ssl-{name.replace('_', '-')} needs --ssl-certfile, the server's certificate")
        return None
    return TlsSettings(**given)
